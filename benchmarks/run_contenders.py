"""Contenders that run a model by a plan: torch with everything in memory, bigload, accelerate and transformers.

accelerate and transformers are called as their own documentation shows, with the device map of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from bigload.errors import NotEnoughMemoryError
from bigload.generation.planned_model import PlannedModel
from bigload.machine.memory.ram import available_memory
from bigload.planning.plan import Plan
from bigload.runtime.device_map.blocks import device_name, device_of
from bigload.runtime.dispatch.load_checkpoint import load_checkpoint_in_model
from bigload.runtime.offload.stored_weights import StoredWeights
from bigload.units import MIB, format_size
from harness import folder_beside, installed_version

_SPARE_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRuntime:
    """A function that builds the model anew, and the files that the model reads while it runs."""

    make: Callable[[], nn.Module]
    files: tuple[Path, ...] = ()


class CannotRunError(Exception):
    """The runtime does not support this model, or the machine is too small; the message is half a sentence."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A way to run a model; `package` is its name on PyPI, `None` for torch and bigload itself."""

    name: str
    prepare: Callable[[PlannedModel, ExitStack], PreparedRuntime]
    package: str | None = None

    @property
    def version(self) -> str | None:
        """Return the installed version of the package, `None` where it is not installed."""
        return None if self.package is None else installed_version(self.package)


def files_of(planned: PlannedModel) -> tuple[Path, ...]:
    """Return the files of the checkpoint."""
    return tuple(planned.checkpoint.root / shard.file for shard in planned.checkpoint.shards)


def _plain(planned: PlannedModel, _opened: ExitStack) -> PreparedRuntime:
    needed, free = planned.checkpoint.total_bytes + _SPARE_BYTES, _free_bytes(planned.device)
    if free is not None and needed > free:
        raise CannotRunError(f"needs {format_size(needed)} of {planned.device}, {format_size(free)} are free")

    def make() -> nn.Module:
        model, device_map = planned.empty(), {"": str(planned.device)}
        try:
            load_checkpoint_in_model(model, _source(planned), device_map, dtype=planned.load_dtype, strict=True)
        except NotEnoughMemoryError as error:
            raise CannotRunError(error.message) from error
        return model

    return PreparedRuntime(make=make)


def _bigload(planned: PlannedModel, _opened: ExitStack) -> PreparedRuntime:
    return PreparedRuntime(make=planned.dispatched, files=files_of(planned) if planned.on_disk else ())


def _accelerate(planned: PlannedModel, opened: ExitStack) -> PreparedRuntime:
    """Have accelerate dispatch the model; weights on disk are written once in its own format."""
    accelerate, placed = import_module("accelerate"), planned.device_map
    folder = _written_by_accelerate(planned, opened) if planned.on_disk else None
    files = () if folder is None else tuple(sorted(folder.glob("*.dat")))

    def make() -> nn.Module:
        model: nn.Module = planned.empty()
        if {device_name(device) for device in placed.values()} == {"disk"}:
            return accelerate.disk_offload(model, str(folder), execution_device=planned.device)  # type: ignore[no-any-return]
        load_checkpoint_in_model(model, _source(planned), placed, dtype=planned.load_dtype)
        return accelerate.dispatch_model(model, dict(placed), offload_dir=folder)  # type: ignore[no-any-return]

    return PreparedRuntime(make=make, files=files)


def _transformers(planned: PlannedModel, opened: ExitStack) -> PreparedRuntime:
    load = partial(
        planned.maker.model_class.from_pretrained,
        planned.checkpoint.root,
        dtype=planned.load_dtype or planned.maker.dtype,
        device_map=dict(planned.device_map),
        local_files_only=True,
    )
    beside = folder_beside(planned.checkpoint.root, ".bigload-transformers-", 0, opened)

    def make() -> nn.Module:
        planned.maker.config.use_cache = planned.keeps_cache
        model: nn.Module = load(config=planned.maker.config, offload_folder=str(beside))
        return model.eval()

    return PreparedRuntime(make=make, files=files_of(planned) if planned.on_disk else ())


def _source(planned: PlannedModel) -> Plan | str:
    return str(planned.checkpoint.root) if planned.plan is None else planned.plan


def _written_by_accelerate(planned: PlannedModel, opened: ExitStack) -> Path:
    utils, placed = import_module("accelerate.utils"), planned.device_map
    needed = sum(planned.checkpoint.tensors[name].num_bytes for name in planned.on_disk) + _SPARE_BYTES
    folder = folder_beside(planned.checkpoint.root, ".bigload-accelerate-", needed, opened)
    index: dict[str, object] = {}
    with StoredWeights(planned.checkpoint, dtype=planned.load_dtype) as weights:
        for name in weights:
            if device_of(name, placed) == "disk":
                index = utils.offload_weight(weights[name], name, str(folder), index=index)
    utils.save_offload_index(index, str(folder))
    return folder


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() if device.type == "cpu" else None


PLAIN, BIGLOAD = "plain", "bigload"

RUNTIMES: Sequence[Runtime] = (
    Runtime(PLAIN, _plain),
    Runtime(BIGLOAD, _bigload),
    Runtime("accelerate", _accelerate, package="accelerate"),
    Runtime("transformers", _transformers, package="transformers"),
)
"""All runtimes in the order of the table; the model in memory, without hooks, comes first."""
