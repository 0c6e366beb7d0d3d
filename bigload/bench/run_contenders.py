"""Who runs the model in `bench-run`: nobody but torch, bigload, and the others that bring weights in from a disk.

accelerate and transformers are imported by name when they are installed; what they are called with is what their own
documentation shows, with the device map of the plan.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import nn

from bigload.bench.run_model import ModelMaker
from bigload.checkpoint.model import Checkpoint
from bigload.errors import NotEnoughMemoryError, NotEnoughSpaceError
from bigload.loading.tensors import torch_dtype
from bigload.machine.memory import available_memory
from bigload.planning.plan import Plan
from bigload.runtime.device_map.blocks import DeviceLike, device_of, main_device_of, place_of
from bigload.runtime.dispatch.load_and_dispatch import load_and_dispatch, load_checkpoint_and_dispatch
from bigload.runtime.dispatch.load_checkpoint import load_checkpoint_in_model
from bigload.runtime.offload.stored_weights import StoredWeights
from bigload.units import MIB, format_size

_ALL_ON_DISK: Mapping[str, DeviceLike] = {"": "disk"}
_SPARE_BYTES = 256 * MIB

Make = Callable[[], nn.Module]
"""Makes the model anew, ready to run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    """The model that all run, and how.

    Attributes:
        plan: Where its parts go; `None` for everything on the disk.
        keeps_cache: Whether answers carry the KV cache.
        prefetch_bytes: For bigload: see `dispatch_model`.
        resident_bytes: The same.
        opened: Closes, after the bench, what was made for it.
    """

    checkpoint: Checkpoint
    plan: Plan | None
    maker: ModelMaker
    keeps_cache: bool
    prefetch_bytes: int | None
    resident_bytes: int | None
    opened: ExitStack

    @property
    def device_map(self) -> Mapping[str, DeviceLike]:
        """Modules, as the checkpoint names them, to devices."""
        return _ALL_ON_DISK if self.plan is None else replace(self.plan, renamed=None).device_map

    @property
    def device(self) -> torch.device:
        """Where what is on the disk runs."""
        return torch.device(main_device_of(self.device_map))

    @property
    def cast(self) -> torch.dtype | None:
        """What parameters become, where the plan says it; else they are what they are in an empty model."""
        wanted = None if self.plan is None else self.plan.options.workload.load_dtype
        return None if wanted is None else torch_dtype(wanted)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Names of the tensors that are on the disk."""
        placed = self.device_map
        names = (name for name in self.checkpoint.tensors if self.plan is None or not self.plan.leaves_out(name))
        return tuple(name for name in names if device_of(name, placed) == "disk")

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files of the checkpoint."""
        return tuple(self.checkpoint.root / shard.file for shard in self.checkpoint.shards)

    def empty_model(self) -> nn.Module:
        """Return the model without values."""
        return self.maker.empty(keeps_cache=self.keeps_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A contender that can run: what makes its model, and the files that it reads when the model runs."""

    make: Make
    files: tuple[Path, ...] = ()


class CannotRunError(Exception):
    """A contender is not made for this model, or for this machine; says why, as half a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContender:
    """Somebody who runs models. `package` is what pip calls it; nothing for torch and bigload itself."""

    name: str
    prepare: Callable[[RunTarget], Prepared]
    package: str | None = None

    @property
    def version(self) -> str | None:
        """Return the installed version of the package, `None` where it is not installed."""
        try:
            return None if self.package is None else version(self.package)
        except PackageNotFoundError:
            return None


def _plain(target: RunTarget) -> Prepared:
    needed, free = target.checkpoint.total_bytes + _SPARE_BYTES, _free_bytes(target.device)
    if free is not None and needed > free:
        raise CannotRunError(f"needs {format_size(needed)} of {target.device}, where {format_size(free)} are free")

    def make() -> nn.Module:
        model = target.empty_model()
        try:
            load_checkpoint_in_model(model, _source(target), {"": str(target.device)}, dtype=target.cast, strict=True)
        except NotEnoughMemoryError as error:
            raise CannotRunError(error.message) from error
        return model

    return Prepared(make=make)


def ours(target: RunTarget) -> Prepared:
    """Have bigload dispatch the model, its weights read in the checkpoint."""

    def make() -> nn.Module:
        model = target.empty_model()
        if target.plan is None:
            return load_checkpoint_and_dispatch(
                model,
                str(target.checkpoint.root),
                _ALL_ON_DISK,
                strict=True,
                prefetch_bytes=target.prefetch_bytes,
                resident_bytes=target.resident_bytes,
            )
        return load_and_dispatch(
            model, target.plan, prefetch_bytes=target.prefetch_bytes, resident_bytes=target.resident_bytes
        )

    return Prepared(make=make, files=target.files if target.on_disk else ())


def _accelerate(target: RunTarget) -> Prepared:
    """Have accelerate dispatch the model. What is on the disk is written there once, in its own format."""
    accelerate, placed = import_module("accelerate"), target.device_map
    folder = _written_by_accelerate(target) if target.on_disk else None
    files = () if folder is None else tuple(sorted(folder.glob("*.dat")))

    def make() -> nn.Module:
        model: nn.Module = target.empty_model()
        if {place_of(device) for device in placed.values()} == {"disk"}:
            return accelerate.disk_offload(model, str(folder), execution_device=target.device)  # type: ignore[no-any-return]
        load_checkpoint_in_model(model, _source(target), placed, dtype=target.cast)
        return accelerate.dispatch_model(model, dict(placed), offload_dir=folder)  # type: ignore[no-any-return]

    return Prepared(make=make, files=files)


def _transformers(target: RunTarget) -> Prepared:
    load = partial(
        target.maker.model_class.from_pretrained,
        target.checkpoint.root,
        dtype=target.cast or target.maker.dtype,
        device_map=dict(target.device_map),
        local_files_only=True,
    )
    beside = _beside(target, "bigload-transformers-")

    def make() -> nn.Module:
        target.maker.config.use_cache = target.keeps_cache
        model: nn.Module = load(config=target.maker.config, offload_folder=str(beside))
        return model.eval()

    return Prepared(make=make, files=target.files if target.on_disk else ())


def _source(target: RunTarget) -> Plan | str:
    return str(target.checkpoint.root) if target.plan is None else target.plan


def _written_by_accelerate(target: RunTarget) -> Path:
    needed = sum(target.checkpoint.tensors[name].num_bytes for name in target.on_disk) + _SPARE_BYTES
    beside = target.checkpoint.root.resolve().parent
    free = shutil.disk_usage(beside).free
    if needed > free:
        raise NotEnoughSpaceError(beside, needed_bytes=needed, free_bytes=free)
    folder = _beside(target, "bigload-accelerate-")
    offload_weight = import_module("accelerate.utils").offload_weight
    index: dict[str, object] = {}
    placed = target.device_map
    with StoredWeights(target.checkpoint, dtype=target.cast) as weights:
        for name in weights:
            if device_of(name, placed) == "disk":
                index = offload_weight(weights[name], name, str(folder), index=index)
    import_module("accelerate.utils").save_offload_index(index, str(folder))
    return folder


def _beside(target: RunTarget, prefix: str) -> Path:
    """Return a new folder on the disk of the checkpoint, which goes after the bench."""
    beside = target.checkpoint.root.resolve().parent
    return Path(target.opened.enter_context(tempfile.TemporaryDirectory(prefix=f".{prefix}", dir=beside)))


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() if device.type == "cpu" else None


PLAIN, BIGLOAD = "plain", "bigload"

CONTENDERS: Sequence[RunContender] = (
    RunContender(name=PLAIN, prepare=_plain),
    RunContender(name=BIGLOAD, prepare=ours),
    RunContender(name="accelerate", package="accelerate", prepare=_accelerate),
    RunContender(name="transformers", package="transformers", prepare=_transformers),
)
"""Everyone that the bench knows, in the order in which they are shown: the plain resident model first."""
