"""Other loaders on the same files, for whoever wants to see them beside bigload's on one machine.

bigload needs none of them. They are imported by name, when `--peers` asks for them and they are installed; what they
are called with is what their own documentation shows for a local checkpoint.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigload.bench.memory import MemoryKind
from bigload.bench.touch import finish
from bigload.checkpoint.model import Checkpoint
from bigload.errors import NotEnoughSpaceError
from bigload.loading.tensors import torch_dtype, torch_shape

if TYPE_CHECKING:
    import torch
    from torch import nn

_SAFETENSORS = (".safetensors",)
_PICKLES = (".bin", ".pt", ".pth")
_SPARE_BYTES = 64 * 2**20

Tensors = Mapping[str, "torch.Tensor"]
Load = Callable[[], Tensors]
"""Loads everything anew and returns the tensors by name; they keep alive whatever holds their memory."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a peer is to load and where to; `opened` closes, after the bench, what was made for it."""

    checkpoint: Checkpoint
    device: str
    opened: ExitStack

    @property
    def files(self) -> list[str]:
        """Return the paths of the shards."""
        return [str(self.checkpoint.root / shard.file) for shard in self.checkpoint.shards]


class CannotLoadError(Exception):
    """A peer is not made for this checkpoint; says why, as half a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another loader: `package` is what pip calls it, `memory` what its tensors end in on a CPU.

    `prepare` makes what may be made beforehand, and returns what is to be timed.
    """

    name: str
    package: str
    memory: MemoryKind
    suffixes: Sequence[str]
    prepare: Callable[[Target], Load]

    @property
    def version(self) -> str | None:
        """Return the installed version, `None` where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def ready(self, target: Target) -> Load:
        """Return what loads the checkpoint to the last byte.

        Raises:
            CannotLoadError: the peer does not read such files, or lacks something.
            Exception: whatever the peer raises.
        """
        suffixes = {Path(file).suffix for file in target.files}
        if not suffixes <= set(self.suffixes):
            raise CannotLoadError(f"reads {', '.join(self.suffixes)}, not {', '.join(sorted(suffixes))}")
        return _finished(self.prepare(target), self.memory if target.device == "cpu" else MemoryKind.DEVICE)


def _finished(load: Load, memory: MemoryKind) -> Load:
    def load_and_finish() -> Tensors:
        tensors = load()
        finish(tensors.values(), memory)
        return tensors

    return load_and_finish


def _safetensors(target: Target) -> Load:
    load_file = import_module("safetensors.torch").load_file
    return lambda: _merged(load_file(file, device=target.device) for file in target.files)


def _safetensors_cloned(target: Target) -> Load:
    load_file = import_module("safetensors.torch").load_file

    def load() -> Tensors:
        tensors: dict[str, torch.Tensor] = {}
        for file in target.files:
            tensors |= {name: tensor.clone() for name, tensor in load_file(file, device=target.device).items()}
        return tensors

    return load


def _transformers(target: Target) -> Load:
    folder = target.checkpoint.root
    if not (folder / "config.json").is_file():
        raise CannotLoadError("it needs a config.json beside the weights")
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # No code of the checkpoint's own is run, and nobody is asked whether it may be.
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    names = config.architectures or []
    if not names or not hasattr(transformers, names[0]):
        raise CannotLoadError(f"it has no class for {names[0] if names else 'a config.json without architectures'}")
    model_class = getattr(transformers, names[0])

    def load() -> Tensors:
        model = model_class.from_pretrained(
            folder, config=config, dtype="auto", device_map=_elsewhere(target), local_files_only=True
        )
        return dict(model.state_dict())

    return load


def _accelerate(target: Target) -> Load:
    load_checkpoint = import_module("accelerate").load_checkpoint_in_model

    def load() -> Tensors:
        model = empty_model(target.checkpoint)
        load_checkpoint(model, str(target.checkpoint.root), device_map={"": target.device})
        return dict(model.state_dict())

    return load


def _fastsafetensors(target: Target) -> Load:
    library = import_module("fastsafetensors")

    def load() -> Tensors:
        loader = library.SafeTensorsFileLoader(library.SingleGroup(), device=target.device, nogds=True)
        loader.add_filenames({0: target.files})
        buffers = loader.copy_files_to_device()
        tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
        return _Held(tensors, buffers, loader)

    return load


def _runai(target: Target) -> Load:
    streamer_class = import_module("runai_model_streamer").SafetensorsStreamer

    def load() -> Tensors:
        with streamer_class() as streamer:
            streamer.stream_files(target.files)
            return {name: tensor.to(target.device) for name, tensor in streamer.get_tensors()}

    return load


def _tensorizer(target: Target) -> Load:
    """Write the checkpoint once in tensorizer's own format, beside it on the same disk, and load that."""
    library = import_module("tensorizer")
    safetensors = import_module("safetensors.torch")
    beside = target.checkpoint.root.resolve().parent
    needed, free = target.checkpoint.total_bytes + _SPARE_BYTES, shutil.disk_usage(beside).free
    if needed > free:
        raise NotEnoughSpaceError(beside, needed_bytes=needed, free_bytes=free)
    folder = target.opened.enter_context(tempfile.TemporaryDirectory(prefix=".bigload-tensorizer-", dir=beside))
    file = str(Path(folder) / "model.tensors")
    serializer = library.TensorSerializer(file)
    serializer.write_state_dict(_merged(safetensors.load_file(shard) for shard in target.files))
    serializer.close()

    def load() -> Tensors:
        with library.TensorDeserializer(file, device=target.device) as deserializer:
            return dict(deserializer.items())

    return load


def _torch_load(target: Target) -> Load:
    import torch

    return lambda: _merged(torch.load(f, map_location=target.device, weights_only=True) for f in target.files)


def _torch_load_mapped(target: Target) -> Load:
    import torch

    return lambda: _merged(
        torch.load(file, map_location=target.device, weights_only=True, mmap=True) for file in target.files
    )


class _Held(dict[str, Any]):
    """Tensors, and what has to live as long as they do."""

    def __init__(self, tensors: Tensors, buffers: Any, loader: Any) -> None:  # noqa: ANN401 - another library's
        super().__init__(tensors)
        self._buffers, self._loader = buffers, loader

    def __del__(self) -> None:
        self.clear()
        self._buffers.close()
        self._loader.close()


def empty_model(checkpoint: Checkpoint) -> nn.Module:
    """Return a tree of modules with the names of `checkpoint`, whose parameters, on meta, have its shapes and dtypes.

    It is enough for what only puts tensors into modules, and needs no code of a model.
    """
    import torch
    from torch import nn

    model = nn.Module()
    for tensor in checkpoint.tensors.values():
        *path, leaf = tensor.name.split(".")
        module = model
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        empty = torch.empty(torch_shape(tensor.dtype, tensor.shape), dtype=torch_dtype(tensor.dtype), device="meta")
        module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return model


def _merged(parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    merged: dict[str, torch.Tensor] = {}
    for part in parts:
        merged |= part
    return merged


def _elsewhere(target: Target) -> str | None:
    return None if target.device == "cpu" else target.device


PEERS = (
    Peer(
        name="safetensors",
        package="safetensors",
        memory=MemoryKind.FILE,
        suffixes=_SAFETENSORS,
        prepare=_safetensors,
    ),
    Peer(
        name="safetensors, clone",
        package="safetensors",
        memory=MemoryKind.PRIVATE,
        suffixes=_SAFETENSORS,
        prepare=_safetensors_cloned,
    ),
    Peer(
        name="transformers",
        package="transformers",
        memory=MemoryKind.FILE,
        suffixes=_SAFETENSORS,
        prepare=_transformers,
    ),
    Peer(
        name="accelerate",
        package="accelerate",
        memory=MemoryKind.FILE,  # a model on meta gets the maps that safetensors makes
        suffixes=_SAFETENSORS,
        prepare=_accelerate,
    ),
    Peer(
        name="accelerate, .bin",
        package="accelerate",
        memory=MemoryKind.PRIVATE,
        suffixes=_PICKLES,
        prepare=_accelerate,
    ),
    Peer(
        name="fastsafetensors",
        package="fastsafetensors",
        memory=MemoryKind.PRIVATE,
        suffixes=_SAFETENSORS,
        prepare=_fastsafetensors,
    ),
    Peer(
        name="run:ai streamer",
        package="runai-model-streamer",
        memory=MemoryKind.PRIVATE,
        suffixes=_SAFETENSORS,
        prepare=_runai,
    ),
    Peer(
        name="tensorizer",
        package="tensorizer",
        memory=MemoryKind.PRIVATE,
        suffixes=_SAFETENSORS,
        prepare=_tensorizer,
    ),
    Peer(name="torch.load", package="torch", memory=MemoryKind.PRIVATE, suffixes=_PICKLES, prepare=_torch_load),
    Peer(
        name="torch.load, mmap",
        package="torch",
        memory=MemoryKind.FILE,
        suffixes=_PICKLES,
        prepare=_torch_load_mapped,
    ),
)
"""Every loader that the bench knows, in the order in which they are shown."""
