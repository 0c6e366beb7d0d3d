"""Sources of a model's weights: a checkpoint, a plan, or the folder that was resharded by one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from bigload.checkpoint.model import AssembledTensor, Checkpoint, StoredTensor
from bigload.checkpoint.quantisation import WeightInParts
from bigload.checkpoint.records.recorded_digests import RecordedDigests
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.dtypes import DType
from bigload.errors import InvalidCheckpointError, LegacyPickleError, Problem
from bigload.loading.load import load_selected
from bigload.loading.scheduling.slices import Slice
from bigload.loading.selection import select
from bigload.loading.settings import Method
from bigload.loading.tensors.legacy_torch import as_checkpoint, as_requested, load_legacy, tensor_of
from bigload.planning import load_dtype
from bigload.planning.plan import Plan
from bigload.planning.plan_file import PLAN_FILE, is_plan, open_planned, read_plan
from bigload.runtime.dispatch.packed_weights import packed_view


@dataclass(frozen=True, kw_only=True)
class CheckpointSource:
    """An opened checkpoint, and what came with it.

    Attributes:
        view: Its tensors, by the names that they are loaded by.
        plan: The plan that named the checkpoint.
        legacy: The tensors of torch files in the old form.
        packed: Weights that are made of several tensors, by their names in the model.
        recorded: Digests to compare all that is loaded with.
        method: The I/O method; see `load`.
    """

    view: CheckpointView
    plan: Plan | None = None
    legacy: Mapping[str, torch.Tensor] | None = None
    packed: Mapping[str, WeightInParts] = field(default_factory=dict)
    recorded: RecordedDigests | None = None
    method: Method | None = None

    @classmethod
    def open(cls, what: str | os.PathLike[str] | Checkpoint | Plan) -> CheckpointSource:
        """Open a checkpoint, a plan or a resharded folder; see `load_checkpoint_in_model`."""
        if isinstance(what, Checkpoint):
            return cls(view=CheckpointView.of(_for_torch(what)))
        plan = what if isinstance(what, Plan) else _plan_at(Path(what))
        path = plan.checkpoint_path if plan is not None else what
        assert not isinstance(path, Plan), "its path was taken"
        try:
            opened = _for_torch(open_planned(plan, Path(path) if isinstance(path, os.PathLike) else path))
        except LegacyPickleError as error:
            whole = load_legacy(error.paths)
            return cls(view=CheckpointView.of(as_checkpoint(str(error.path), whole)), legacy=whole)
        if plan is None:
            return cls(view=CheckpointView.of(opened))
        kept = {name: tensor for name, tensor in opened.tensors.items() if not plan.leaves_out(name)}
        return cls(view=CheckpointView.of(replace(opened, tensors=kept)), plan=plan)

    def for_model(self, model: nn.Module) -> CheckpointSource:
        """Return the source with the tensors of `model` that the checkpoint makes, by their names there."""
        view, packed = packed_view(model, self.checkpoint)
        return replace(self, view=view, packed=packed)

    @property
    def checkpoint(self) -> Checkpoint:
        """The opened checkpoint, without the tensors that a plan leaves out."""
        return self.view.checkpoint

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.view.tensors

    @cached_property
    def unpacked(self) -> Mapping[str, StoredTensor]:
        """Tensors that can be loaded by themselves: all but the parts of packed weights."""
        parts = {part for each in self.packed.values() for part in each.parts}
        return {name: tensor for name, tensor in self.tensors.items() if name not in parts} if parts else self.tensors

    @property
    def dtype(self) -> DType | None:
        return None if self.plan is None else self.plan.options.workload.load_dtype

    def load(
        self, places: Mapping[str, torch.device], dtype: DType | None, slices: Mapping[str, Slice] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that `places` names, on the devices that it says."""
        selection = select(self.view, only=list(places), device=places, dtype=dtype, slices=slices)
        if self.legacy is None:
            return load_selected(self.checkpoint, selection, self.method, recorded=self.recorded)
        return {
            want.name: as_requested(want, tensor_of(self.view, want.name, self.legacy)) for want in selection.wanted
        }

    def load_stored(self, places: Mapping[str, torch.device]) -> dict[str, torch.Tensor]:
        return replace(self, view=CheckpointView.of(self.checkpoint)).load(places, None)

    def can_slice(self, name: str) -> bool:
        """Return whether rows of a tensor can be loaded by themselves; digests are of whole tensors."""
        tensor = self.tensors[name]
        is_by_row = isinstance(tensor, AssembledTensor) or (tensor.strides is None and tensor.dtype.bits >= 8)
        return self.legacy is None and self.recorded is None and is_by_row and bool(tensor.shape)


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
    """Return `checkpoint`, unless it says that it was saved for something that lays weights out in another way."""
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


def loaded_dtype(tensor: StoredTensor, dtype: DType | None) -> DType:
    """Return what `tensor` becomes if plain floating-point tensors are to be of `dtype`."""
    return load_dtype.loaded_dtype(tensor.name, tensor.dtype, dtype)
