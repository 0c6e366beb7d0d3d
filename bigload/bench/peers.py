"""Other loaders that `bench-load --peers` times, imported by name and called as their documentation shows.

benchmarks/loader_peers.py adds those that need a format of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigload.bench.loaded_memory import MemoryKind, finish
from bigload.checkpoint.model import Checkpoint

if TYPE_CHECKING:
    import torch

SAFETENSORS = (".safetensors",)
_PICKLES = (".bin", ".pt", ".pth")

Tensors = Mapping[str, "torch.Tensor"]
Load = Callable[[], Tensors]
"""Load everything anew and return the tensors by name; they keep alive whatever holds their memory."""


@dataclass(frozen=True, slots=True)
class PeerTarget:
    """The checkpoint a peer loads and the device; `opened` closes temporary state after the bench."""

    checkpoint: Checkpoint
    device: str
    opened: ExitStack

    @property
    def files(self) -> list[str]:
        return [str(self.checkpoint.root / shard.file) for shard in self.checkpoint.shards]


class CannotLoadError(Exception):
    """The peer does not support this checkpoint; the message is half a sentence."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another loader: its name on PyPI, the memory that its tensors end in on a CPU, and the files it reads.

    `prepare` does what may be done beforehand, and returns the function to time.
    """

    name: str
    package: str
    memory: MemoryKind
    suffixes: Sequence[str]
    prepare: Callable[[PeerTarget], Load]

    @property
    def version(self) -> str | None:
        """Return the installed version, `None` where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def ready(self, target: PeerTarget) -> Load:
        """Return what loads the checkpoint to the last byte.

        Raises:
            CannotLoadError: the peer does not read such files, or lacks something.
            Exception: whatever the peer raises.
        """
        suffixes = {Path(file).suffix for file in target.files}
        if not suffixes <= set(self.suffixes):
            raise CannotLoadError(f"reads {', '.join(self.suffixes)}, not {', '.join(sorted(suffixes))}")
        load, memory = self.prepare(target), self.memory if target.device == "cpu" else MemoryKind.DEVICE

        def load_and_finish() -> Tensors:
            tensors = load()
            finish(tensors.values(), memory)
            return tensors

        return load_and_finish


def merged(parts: Iterable[Tensors]) -> dict[str, torch.Tensor]:
    """Return all parts as one dict."""
    return {name: tensor for part in parts for name, tensor in part.items()}


def _safetensors(target: PeerTarget) -> Load:
    load_file = import_module("safetensors.torch").load_file
    return lambda: merged(load_file(file, device=target.device) for file in target.files)


def _safetensors_cloned(target: PeerTarget) -> Load:
    load: Any = import_module("safetensors.torch").load_file
    return lambda: merged(
        {name: tensor.clone() for name, tensor in load(file, device=target.device).items()} for file in target.files
    )


def _transformers(target: PeerTarget) -> Load:
    folder, device_map = target.checkpoint.root, None if target.device == "cpu" else target.device
    if not (folder / "config.json").is_file():
        raise CannotLoadError("it needs a config.json beside the weights")
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # Code in the checkpoint's folder is never executed, and no prompt asks for permission.
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    names = config.architectures or []
    if not names or not hasattr(transformers, names[0]):
        raise CannotLoadError(f"it has no class for {names[0] if names else 'a config.json without architectures'}")
    load: Any = getattr(transformers, names[0]).from_pretrained
    return lambda: dict(
        load(folder, config=config, dtype="auto", device_map=device_map, local_files_only=True).state_dict()
    )


def _runai(target: PeerTarget) -> Load:
    streamer_class = import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> Tensors:
        with streamer_class() as streamer:
            streamer.stream_files(target.files)
            return {name: tensor.to(target.device) for name, tensor in streamer.get_tensors()}

    return load


def _torch_load(target: PeerTarget, **options: object) -> Load:
    load: Any = import_module("torch").load
    return lambda: merged(load(file, map_location=target.device, weights_only=True, **options) for file in target.files)


PEERS = (
    Peer("safetensors", "safetensors", MemoryKind.FILE, SAFETENSORS, _safetensors),
    Peer("safetensors, clone", "safetensors", MemoryKind.PRIVATE, SAFETENSORS, _safetensors_cloned),
    Peer("transformers", "transformers", MemoryKind.FILE, SAFETENSORS, _transformers),
    Peer("run:ai streamer", "runai-model-streamer", MemoryKind.PRIVATE, SAFETENSORS, _runai),
    Peer("torch.load", "torch", MemoryKind.PRIVATE, _PICKLES, _torch_load),
    Peer("torch.load, mmap", "torch", MemoryKind.FILE, _PICKLES, lambda target: _torch_load(target, mmap=True)),
)
"""All loaders that `--peers` times, in the order of the table."""
