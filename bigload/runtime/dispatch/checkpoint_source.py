"""Sources of a model's weights: a checkpoint, a plan, or the folder that was resharded by one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.dtypes import DType
from bigload.errors import InvalidCheckpointError, LegacyPickleError, Problem
from bigload.layouts.kinds.device_folders import PLAN_FILE
from bigload.loading.legacy_torch import as_checkpoint, load_legacy
from bigload.loading.load import load
from bigload.loading.slices import Slice
from bigload.loading.tensors import torch_dtype
from bigload.planning.load_dtype import as_dtype
from bigload.planning.plan import Plan
from bigload.planning.plan_file import is_plan, open_planned, read_plan
from bigload.runtime.device_map.blocks import DeviceMap


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSource:
    """An opened checkpoint, and what came with it.

    Attributes:
        device_map: Of the plan.
        dtype: What the plan counted with.
        legacy: The tensors of torch files in the old form.
    """

    checkpoint: Checkpoint
    device_map: DeviceMap | None = None
    dtype: DType | None = None
    legacy: Mapping[str, torch.Tensor] | None = None

    @classmethod
    def open(cls, what: str | os.PathLike[str] | Checkpoint | Plan) -> CheckpointSource:
        """Open a checkpoint, a plan or a resharded folder; see `load_checkpoint_in_model`."""
        if isinstance(what, Checkpoint):
            return cls(checkpoint=_for_torch(what))
        plan = what if isinstance(what, Plan) else _plan_at(Path(what))
        path = plan.checkpoint_path if plan is not None else what
        assert not isinstance(path, Plan), "its path was taken"
        try:
            opened = _for_torch(open_planned(plan, Path(path) if isinstance(path, os.PathLike) else path))
        except LegacyPickleError as error:
            whole = load_legacy(error.paths)
            return cls(checkpoint=as_checkpoint(str(error.path), whole), legacy=whole)
        if plan is None:
            return cls(checkpoint=opened)
        kept = {name: tensor for name, tensor in opened.tensors.items() if not plan.leaves_out(name)}
        planned = replace(opened, tensors=kept)
        return cls(checkpoint=planned, device_map=plan.device_map, dtype=plan.options.workload.load_dtype)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the checkpoint holds."""
        return self.checkpoint.tensors

    def load(
        self, places: Mapping[str, torch.device], dtype: DType | None, slices: Mapping[str, Slice] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that `places` names, on the devices that it says."""
        if self.legacy is None:
            wanted = None if dtype is None else torch_dtype(dtype)
            return dict(load(self.checkpoint, only=list(places), device=places, dtype=wanted, slices=slices))
        return {
            name: self.legacy[name].to(device, torch_dtype(loaded_dtype(self.tensors[name], dtype)))
            for name, device in places.items()
        }

    def can_slice(self, name: str) -> bool:
        """Return whether rows of a tensor can be loaded by themselves."""
        tensor = self.tensors[name]
        return self.legacy is None and tensor.strides is None and bool(tensor.shape) and tensor.dtype.bits >= 8


def _plan_at(path: Path) -> Plan | None:
    """Return the plan in the file `path`, or that of the folder that was resharded by one."""
    if path.suffix == ".json" and is_plan(path):
        return read_plan(path)
    beside = path / PLAN_FILE
    if beside.is_file() and is_plan(beside):
        plan = read_plan(beside)
        if plan.checkpoint_path == str(path):  # not a plan that somebody keeps beside the checkpoint it is for
            return plan
    return None


def _for_torch(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint`, unless it says that it was saved for something that lays weights out in another way.

    Raises:
        InvalidCheckpointError: it was.
    """
    problems = [
        Problem(
            code="not-for-torch",
            file=shard.file,
            text=f"saved for {kind!r:.40}, expected 'pt': weights of others may be laid out in another order",
        )
        for shard in checkpoint.shards
        if (kind := shard.metadata.get("format", "pt")) != "pt"
    ]
    if problems:
        raise InvalidCheckpointError(checkpoint.path, problems)
    return checkpoint


def loaded_dtype(tensor: TensorInfo, dtype: DType | None) -> DType:
    """Return what `tensor` becomes if plain floating-point tensors are to be of `dtype`."""
    return tensor.dtype if dtype is None else as_dtype(tensor, dtype).dtype
