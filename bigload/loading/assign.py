"""Assignment of loaded tensors to an `nn.Module`, matched by names and shapes before a byte is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bigload.checkpoint.model import TensorInfo
from bigload.errors import StateDictMismatchError
from bigload.loading.schedule import RequestedTensor
from bigload.loading.selection import Selection
from bigload.loading.tensors import torch_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A stored tensor and every place in the module that it belongs to: several when weights are tied."""

    tensor_name: str
    places: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a checkpoint and a module have in common, and what only one of them has.

    Attributes:
        assignments: Which stored tensor goes where.
        missing: Names in the module, the first of each group of tied ones, of which the checkpoint has none.
        unexpected: Names in the checkpoint that the module does not have.
        misshapen: Names of different shapes, with both shapes in words.
    """

    assignments: tuple[Assignment, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]


def match(module: nn.Module, selection: Selection, *, strict: bool) -> tuple[Assignment, ...]:
    """Return which of the wanted tensors goes where in `module`, without reading one.

    What stays on disk is left alone.

    Raises:
        StateDictMismatchError: `strict`, and something is missing, unexpected or of another shape.
    """
    found = compare(module, {want.name: want for want in selection.wanted}, selection.left_on_disk)
    if strict and (found.missing or found.unexpected or found.misshapen):
        raise StateDictMismatchError(
            type(module).__name__, missing=found.missing, unexpected=found.unexpected, misshapen=found.misshapen
        )
    return found.assignments


def compare(
    module: nn.Module, tensors: Mapping[str, RequestedTensor] | Mapping[str, TensorInfo], ignored: Collection[str] = ()
) -> Comparison:
    """Return which of `tensors` goes where in `module`, and what does not correspond.

    Tied parameters need one stored tensor among them. Buffers that the module does not save are left alone, and so is
    what one of the names in `ignored` is.
    """
    assignments, missing, misshapen = list[Assignment](), list[str](), list[str]()
    groups = _state(module)
    for places in groups:
        stored = [name for name in places if name in tensors]
        if not stored:
            missing += [] if any(name in ignored for name in places) else [places[0]]
            continue
        want = tensors[stored[0]]
        expected, found = tuple(tensor_named(module, places[0]).shape), torch_shape(want.dtype, want.shape)
        if expected == found:
            assignments.append(Assignment(tensor_name=stored[0], places=places))
        else:
            misshapen.append(f"{stored[0]} is {list(found)} in the checkpoint, {list(expected)} in the module")
    known = {name for places in groups for name in places}
    unexpected = tuple(name for name in (*tensors, *ignored) if name not in known)
    return Comparison(
        assignments=tuple(assignments), missing=tuple(missing), unexpected=unexpected, misshapen=tuple(misshapen)
    )


def assign(module: nn.Module, assignments: tuple[Assignment, ...], tensors: Mapping[str, torch.Tensor]) -> None:
    """Put `tensors` into `module`.

    A parameter or buffer on the meta device becomes the loaded tensor itself, in the checkpoint's dtype. One that has
    memory keeps its device and dtype, and the values are copied into it.
    """
    for assignment in assignments:
        value = tensors[assignment.tensor_name]
        old = tensor_named(module, assignment.places[0])
        if not old.is_meta:
            with torch.no_grad():
                old.copy_(value)
            continue
        new = value
        if isinstance(old, nn.Parameter):
            can_train = value.is_floating_point() or value.is_complex()  # quantised weights are neither
            new = nn.Parameter(value, requires_grad=old.requires_grad and can_train)
        for place in assignment.places:
            parent, _, leaf = place.rpartition(".")
            setattr(module.get_submodule(parent), leaf, new)


def _state(module: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of every saved parameter and buffer; names of one and the same tensor come together."""
    groups: dict[int, list[str]] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        saved = [*owner._parameters.items()]
        saved += [item for item in owner._buffers.items() if item[0] not in owner._non_persistent_buffers_set]
        for leaf, tensor in saved:
            if tensor is not None:
                groups.setdefault(id(tensor), []).append(f"{prefix}.{leaf}" if prefix else leaf)
    return [tuple(names) for names in groups.values()]


def tensor_named(module: nn.Module, name: str) -> torch.Tensor:
    """Return the parameter or buffer of `module` that `name` is."""
    parent, _, leaf = name.rpartition(".")
    owner = module.get_submodule(parent)
    tensor = owner._parameters.get(leaf)
    found = tensor if tensor is not None else owner._buffers[leaf]
    assert found is not None, "only tensors are listed by _state()"
    return found
