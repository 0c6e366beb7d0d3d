"""Assignment of loaded tensors to an `nn.Module`, matched by names and shapes before a byte is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn

from bigload.errors import StateDictMismatchError
from bigload.loading.selection import Selection


class HasTorchShape(Protocol):
    """A tensor that is stored, assembled or requested."""

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape that torch gives it."""


class Assignment(NamedTuple):
    """A stored tensor and every place in the module that it belongs to: several when weights are tied."""

    tensor_name: str
    places: tuple[str, ...]


class NameComparison(NamedTuple):
    """Names that a checkpoint and a module have in common, and those that only one of them has.

    Attributes:
        assignments: Which stored tensor goes where.
        missing: Names in the module, the first of each group of tied ones, of which the checkpoint has none.
        misshapen: Names of different shapes, with both shapes in words.
        problems: Why other tensors of the module cannot be made of stored ones, a sentence each.
    """

    assignments: tuple[Assignment, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    problems: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether both have the same names and shapes."""
        return not (self.missing or self.unexpected or self.misshapen or self.problems)

    def error(self, module: str, **hint: str) -> StateDictMismatchError:
        """Return the error that says all of it about a module of class `module`; see there for the default `hint`."""
        return StateDictMismatchError(
            module,
            missing=self.missing,
            unexpected=self.unexpected,
            misshapen=self.misshapen,
            problems=self.problems,
            **hint,
        )


def match(
    module: nn.Module,
    selection: Selection,
    *,
    strict: bool,
    unexpected: Sequence[str] = (),
    problems: Sequence[str] = (),
) -> tuple[Assignment, ...]:
    """Return which of the wanted tensors goes where in `module`, without reading one.

    What stays on disk is left alone. `unexpected` and `problems` are what a conversion has found; see `NameComparison`.
    """
    compared = compare(module, {want.name: want for want in selection.wanted}, selection.left_on_disk)
    found = compared._replace(unexpected=(*compared.unexpected, *unexpected), problems=tuple(problems))
    if found.problems or (strict and not found.is_exact):
        raise found.error(type(module).__name__)
    return found.assignments


def compare(module: nn.Module, tensors: Mapping[str, HasTorchShape], ignored: Collection[str] = ()) -> NameComparison:
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
        expected, found = tuple(tensor_named(module, places[0]).shape), want.torch_shape
        if expected == found:
            assignments.append(Assignment(tensor_name=stored[0], places=places))
        else:
            misshapen.append(f"{stored[0]} is {list(found)} in the checkpoint, {list(expected)} in the module")
    known = {name for places in groups for name in places}
    unexpected = tuple(name for name in (*tensors, *ignored) if name not in known)
    return NameComparison(
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
        if old.is_meta:
            replace_tensor(module, assignment, value)
        else:
            with torch.no_grad():
                old.copy_(value)


def replace_tensor(module: nn.Module, assignment: Assignment, value: torch.Tensor) -> None:
    """Make `value` the parameter or buffer of `module` at all places of `assignment`."""
    old = tensor_named(module, assignment.places[0])
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
