"""Placeholder tensors for weights whose values are elsewhere, which raise when an operation needs the values.

torch computes with a tensor of the meta device without an error: `F.linear` on the CPU reads memory that was never
written. An absent weight has its form (shape, dtype, device) as any tensor of the meta device does, at the same cost;
an operation that needs its values raises `AbsentWeightError`. That needs no check in a forward: torch asks the class of
the tensor (`__torch_dispatch__`) when an operation reaches it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from bigload.errors import AbsentWeightError, abridged

_META = torch.device("meta")
_OF_FORM = frozenset(
    {
        *("_to_copy", "alias", "clone", "detach"),
        *(f"new_{kind}" for kind in ("empty", "empty_strided", "full", "ones", "zeros")),
        *(f"{kind}_like" for kind in ("empty", "full", "ones", "rand", "randn", "zeros")),
    }
)
"""Operations that need nothing but the form of their argument, if the result has memory at all."""
_OF_VALUES_ELSEWHERE = frozenset({"_to_copy", "clone"})
"""Those among them that need values to give a result on another device."""


NOT_LOADED = "has no values: it was not loaded, because the checkpoint lacks it or it stays on disk"
"""Reason for what is on the meta device after a load."""
LOAD_OR_DISPATCH = (
    "load the rest into the model too, or dispatch the model, which brings what stays on disk "
    "(load_checkpoint_and_dispatch, load_and_dispatch)"
)
"""What to do about it."""


class Absence(NamedTuple):
    """Reason for a weight without values: what follows "which" in a sentence about it, and a hint what to do."""

    name: str
    reason: str
    hint: str


class _WithoutValues:
    """Base of tensors without values."""

    __slots__ = ()

    absence: Absence
    form: Tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return what is true of the form alone, and raise `AbsentWeightError` for what needs values."""
        return _dispatched(func, args, kwargs or {})

    def __deepcopy__(self: Any, memo: dict[int, Any]) -> Tensor:
        known: Tensor | None = memo.get(id(self))
        if known is None:
            known = memo[id(self)] = absent(copy.deepcopy(form_of(self), memo), self.absence)
        return known

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[object, ...]:
        return absent, (form_of(self), self.absence)


class AbsentTensor(_WithoutValues, Tensor):  # type: ignore[misc]
    """A buffer, or part of a weight, without values."""

    __slots__ = ("absence", "form")
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter does


class AbsentParameter(_WithoutValues, nn.Parameter):  # type: ignore[misc]
    """A parameter without values."""

    __slots__ = ("absence", "form")

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> nn.Parameter:  # type: ignore[misc]
        """Return `data` as an ordinary parameter: code that replaces a weight makes the new one by the class of it."""
        return nn.Parameter(data, requires_grad)


Absent = (AbsentTensor, AbsentParameter)


def absent(form: Tensor, absence: Absence) -> Tensor:
    """Return a stand-in for a weight that has the form of `form`, a tensor on the meta device.

    Tensors of other classes are returned as they are: what operations do with them is up to these classes.
    """
    if isinstance(form, Absent):
        form = form_of(form)
    kind: Any = {Tensor: AbsentTensor, nn.Parameter: AbsentParameter}.get(type(form))
    if kind is None or not form.is_meta or form.layout is not torch.strided:
        return form
    stand_in: Any = Tensor._make_subclass(kind, form.detach(), form.requires_grad)
    stand_in.__dict__.update(form.__dict__)
    stand_in.absence, stand_in.form = absence, form
    return stand_in  # type: ignore[no-any-return]


def form_of(tensor: Tensor) -> Tensor:
    """Return the tensor on the meta device that an absent weight stands for; other tensors as they are."""
    if not isinstance(tensor, Absent):
        return tensor
    form = tensor.form
    if form.dtype != tensor.dtype:  # it was cast since
        cast = form.detach().to(tensor.dtype)
        form = nn.Parameter(cast, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else cast
    form.__dict__.update(tensor.__dict__)
    return form.requires_grad_(tensor.requires_grad)


def _dispatched(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    found: list[Absence] = []

    def plain(tensor: Any) -> Tensor:
        found.append(tensor.absence)
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)

    plain_args, plain_kwargs = tree_map_only(Absent, plain, (tuple(args), dict(kwargs)))
    operation = func.overloadpacket.__name__
    device = kwargs.get("device")
    moves = operation in _OF_VALUES_ELSEWHERE and device is not None and torch.device(device) != _META
    if moves or not (operation in _OF_FORM or func.is_view):
        names = tuple(dict.fromkeys(absence.name for absence in found))
        message = f"cannot compute {operation} with {', '.join(abridged(names))}, which {found[0].reason}"
        raise AbsentWeightError(message, names, hint=found[0].hint)
    return tree_map_only(Tensor, lambda each: absent(each, found[0]), func(*plain_args, **plain_kwargs))


def mark_absent(module: nn.Module, *, reason: str, hint: str) -> None:
    """Have every tensor of `module` that is on the meta device raise when it is computed with; ties stay ties."""
    marked: dict[int, Tensor] = {}
    for prefix, owner in module.named_modules():
        tables: tuple[dict[str, Any], ...] = (owner._parameters, owner._buffers)
        for table in tables:
            for key, tensor in table.items():
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    name = f"{prefix}.{key}" if prefix else key
                    known = marked.get(id(tensor))
                    marked[id(tensor)] = table[key] = (
                        absent(tensor, Absence(name, reason, hint)) if known is None else known
                    )
