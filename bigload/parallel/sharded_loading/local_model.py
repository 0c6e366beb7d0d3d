"""A rank's part of a model: shard specs, dtypes and devices of its tensors, and their assignment."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bigload.checkpoint.model import AssembledTensor
from bigload.conversion.checkpoint_view import CheckpointView, view_for
from bigload.errors import OptionError, StateDictMismatchError, abridged
from bigload.loading.scheduling.piece_copies import ShardSpec, spec_shape, whole_spec
from bigload.loading.scheduling.read_jobs import CPU
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.staging.accelerators import check_present
from bigload.loading.tensors.assign import Assignment, compare, replace_tensor, tensor_named
from bigload.loading.tensors.views import check_dtypes, dtype_of
from bigload.parallel.sharded_loading.agreement import HostPeers
from bigload.parallel.sharded_loading.local_tensors import LocalPart, LocalTensor
from bigload.parallel.sharded_loading.shard_spec import (
    check_divisions,
    spec_of_division,
    spec_of_dtensor,
)
from bigload.planning.tensor_parallel.division import Division

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A model of which this process holds its part, and the arguments of `load_sharded`."""

    model: nn.Module
    divisions: Mapping[str, Division]
    rank: int
    names: Mapping[str, str]
    device: torch.device
    strict: bool
    peers: HostPeers

    def view(self, stored: CheckpointView) -> CheckpointView:
        """Return the tensors of `stored` by their names in the model, converted if transformers would convert them."""
        self._check_names()
        renamed = set(self.names.values())
        tensors = {name: tensor for name, tensor in stored.tensors.items() if name not in renamed}
        for name, theirs in self.names.items():
            tensors.pop(name, None)
            if theirs in stored.tensors:
                tensors[name] = replace(stored.tensors[theirs], name=name)
        return view_for(self.model, stored._replace(tensors=tensors), self._whole_shapes())

    @torch.no_grad()  # a DTensor gives its local tensor without a step of autograd
    def parts(self, view: CheckpointView) -> list[tuple[Assignment, LocalPart]]:
        """Return the parts of the tensors of `view` and their assignments; first all checks without reads."""
        self._check_names()
        tensors = {name: AssembledTensor.of(tensor) for name, tensor in view.tensors.items()}
        forms = {name: replace(tensor, shape=self._shape(name, tensor)) for name, tensor in tensors.items()}
        found = compare(self.model, forms)
        found = found._replace(unexpected=(*found.unexpected, *view.unexpected), problems=view.problems)
        if found.problems or (self.strict and not found.is_exact):
            raise found.error(type(self.model).__name__, **self._hint(view))
        if found.missing or found.misshapen:
            text = "Some weights of %s are not in the checkpoint at %s and stay as they were: %s"
            names = "; ".join(abridged((*found.missing, *found.misshapen)))
            _logger.warning(text, type(self.model).__name__, view.checkpoint.path, names)
        places = [(each, self._part(each, tensors[each.tensor_name])) for each in found.assignments]
        check_parts([part for _, part in places])
        return places

    def _whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole tensors of which the model has a plain part."""
        shapes = {}
        for name, division in self.divisions.items():
            shape = list(tensor_named(self.model, name).shape)
            if division.dim is not None and division.dim < len(shape):
                shape[division.dim] = max(stop for ranges in division.ranges for _, stop in ranges)
            shapes[name] = tuple(shape)
        return shapes

    def _hint(self, view: CheckpointView) -> dict[str, str]:
        unknown = next((pair for pair in self.names.items() if pair[0] not in view.tensors), None)
        if unknown is None:
            return {}
        return {"hint": f'names has "{unknown[1]}" for {unknown[0]}, and the checkpoint has not; nothing was assigned'}

    def _check_names(self) -> None:
        check_divisions(self.divisions, self.rank)
        if not isinstance(self.names, Mapping):
            raise OptionError.of(
                "names", type(self.names).__name__, "a mapping with the checkpoint's name for each name in the model"
            )
        known = {
            *dict(self.model.named_parameters(remove_duplicate=False)),
            *dict(self.model.named_buffers(remove_duplicate=False)),
        }
        for argument, told in (("divisions", self.divisions), ("names", self.names)):
            if unknown := [name for name in told if name not in known]:
                raise OptionError.of(
                    argument, unknown[0], f"names of parameters and buffers of {type(self.model).__name__}"
                )

    def _shape(self, name: str, tensor: AssembledTensor) -> tuple[int, ...]:
        """Return the shape that a tensor has in the model: of a plain tensor that is divided, the local one."""
        division = self.divisions.get(name)
        if division is None or isinstance(tensor_named(self.model, name), DTensor):
            return tensor.shape
        return spec_shape(spec_of_division(name, tensor.shape, division, self.rank))

    def _part(self, assignment: Assignment, tensor: AssembledTensor) -> LocalPart:
        name = assignment.places[0]
        old = tensor_named(self.model, name)
        division = next((self.divisions[each] for each in assignment.places if each in self.divisions), None)
        spec = self._spans(name, old, tensor, division)
        local = (old.to_local() if isinstance(old, DTensor) else old).detach()
        if old.device.type != "meta" and local.numel() and tuple(local.shape) != spec_shape(spec):
            found, expected = list(local.shape), list(spec_shape(spec))
            text = f"{name} is {found} on this rank, expected {expected}: {_placed(old, division)}"
            raise StateDictMismatchError(type(self.model).__name__, missing=(), unexpected=(), misshapen=(text,))
        is_meta = old.device.type == "meta"
        return LocalPart(
            stored=tensor,
            spec=spec,
            dtype=old.dtype,
            device=self._device(old) if is_meta else local.device,
            existing=None if is_meta else local,
            is_shared=self.peers.share.processes > 1 and self._is_shared(old, division),
        )

    def _spans(self, name: str, old: torch.Tensor, tensor: AssembledTensor, division: Division | None) -> ShardSpec:
        if division is not None:
            return spec_of_division(name, tensor.shape, division, self.rank)
        return spec_of_dtensor(name, old) if isinstance(old, DTensor) else whole_spec(tensor.shape)

    def _is_shared(self, old: torch.Tensor, division: Division | None) -> bool:
        """Return whether another rank of the host holds some of the same elements, as far as can be told."""
        if division is not None:
            return division.dim is None or division.is_shared
        return not isinstance(old, DTensor) or self.peers.are_shared(old.device_mesh, old.placements)

    def _device(self, old: torch.Tensor) -> torch.device:
        if not isinstance(old, DTensor):
            return self.device
        kind = old.device_mesh.device_type
        return torch.device(kind) if kind == CPU else torch.device(kind, torch.get_device_module(kind).current_device())


def _placed(old: torch.Tensor, division: Division | None) -> str:
    if division is not None:
        return f"its division is {division!r:.200}"
    return f"its placements are {old.placements}" if isinstance(old, DTensor) else "it is not divided"


def check_parts(parts: Sequence[LocalPart]) -> None:
    """Raise before anything is read if a dtype is none of torch's, or cannot become the one that is wanted."""
    for part in parts:
        check_dtypes(RequestedTensor(tensor=piece.tensor, dtype=part.stored.dtype) for piece in part.stored.pieces)
        wanted = dtype_of(part.dtype)
        if wanted is None or (wanted != part.stored.dtype and min(wanted.bits, part.stored.dtype.bits) < 8):
            expected = f"a dtype that {part.stored.dtype}, which it has in the checkpoint, can be cast to"
            raise OptionError.of(f"the dtype of {part.stored.name} in the model", str(part.dtype), expected)
    for place in sorted({part.device_name for part in parts}):
        check_present(place)


def assign_local(model: nn.Module, assignments: Sequence[Assignment], tensors: Sequence[LocalTensor]) -> None:
    """Assign `tensors` to `model`, unless they were read in place."""
    for assignment, local in zip(assignments, tensors, strict=True):
        existing = local.part.existing
        if existing is None:
            old = tensor_named(model, assignment.places[0])
            replace_tensor(
                model, assignment, _distributed(local.tensor, old) if isinstance(old, DTensor) else local.tensor
            )
        elif local.tensor is not existing:
            existing.copy_(local.tensor)


@torch.no_grad()
def _distributed(local: torch.Tensor, old: DTensor) -> DTensor:
    """Return the tensor of which `local` is this rank's part, divided as `old`."""
    mesh, placements, stride = old.device_mesh, old.placements, old.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=old.shape, stride=stride)
