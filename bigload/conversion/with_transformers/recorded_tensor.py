"""A tensor without values that notes which elements of stored tensors its own would be.

Code that rearranges weights is run on such tensors; what comes out says where each element is stored. Only operations
that move elements are known; any other raises `NotAMoveError`, and so does whatever looks at values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigload.conversion.strided_pieces import (
    PiecedTensor,
    concatenated,
    permuted,
    reshaped,
    sliced,
    squeezed,
    unsqueezed,
)


class NotAMoveError(NotImplementedError):
    """`operation` of torch computes, or is not known to move elements only."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} computes new values, or is not known to move elements only")
        self.operation = operation


class RecordedTensor(Tensor):
    """See above. `origin` says which elements of which stored tensors it has."""

    origin: PiecedTensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter does

    @staticmethod
    def __new__(cls: type[RecordedTensor], origin: PiecedTensor, dtype: torch.dtype) -> RecordedTensor:
        """Return the tensor that `origin` describes."""
        made: RecordedTensor = Tensor._make_wrapper_subclass(cls, origin.shape, dtype=dtype, device=torch.device("cpu"))
        made.origin = origin
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # which is a function of C
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Move the pieces as `func` moves elements.

        Raises:
            NotAMoveError: it is not known to do that.
        """
        move = _MOVES.get(func.overloadpacket.__name__)
        if move is None:
            raise NotAMoveError(str(func))
        return move(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RecordedTensor({list(self.shape)}, {len(self.origin.pieces)} pieces)"


def _with(tensor: RecordedTensor, origin: PiecedTensor) -> RecordedTensor:
    return RecordedTensor(origin, tensor.dtype)


def _same(tensor: RecordedTensor, *_args: object, dtype: torch.dtype | None = None, **_: object) -> RecordedTensor:
    return RecordedTensor(tensor.origin, dtype or tensor.dtype)


def _transpose(tensor: RecordedTensor, dim0: int, dim1: int) -> RecordedTensor:
    order = list(range(tensor.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(tensor, order)


def _permute(tensor: RecordedTensor, order: Sequence[int]) -> RecordedTensor:
    return _with(tensor, permuted(tensor.origin, [dim % tensor.dim() for dim in order]))


def _slice(
    tensor: RecordedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> RecordedTensor:
    size = tensor.shape[dim]
    first, stop, _ = slice(start, end).indices(size)
    return _with(tensor, sliced(tensor.origin, dim % tensor.dim(), first, max(first, stop), step))


def _select(tensor: RecordedTensor, dim: int, index: int) -> RecordedTensor:
    dim, index = dim % tensor.dim(), index % tensor.shape[dim]
    return _with(tensor, squeezed(sliced(tensor.origin, dim, index, index + 1), dim))


def _split_with_sizes(tensor: RecordedTensor, sizes: Sequence[int], dim: int = 0) -> list[RecordedTensor]:
    parts, position = [], 0
    for size in sizes:
        parts.append(_slice(tensor, dim, position, position + size))
        position += size
    return parts


def _split(tensor: RecordedTensor, size: int, dim: int = 0) -> list[RecordedTensor]:
    total = tensor.shape[dim]
    return _split_with_sizes(tensor, [min(size, total - first) for first in range(0, total, size)], dim)


def _squeeze(tensor: RecordedTensor, dim: int | Sequence[int] | None = None) -> RecordedTensor:
    dims = range(tensor.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    made = _same(tensor)  # torch takes no result that is its argument
    for each in sorted((each % tensor.dim() for each in dims), reverse=True):
        made = _with(made, squeezed(made.origin, each)) if made.shape[each] == 1 else made
    return made


def _unsqueeze(tensor: RecordedTensor, dim: int) -> RecordedTensor:
    return _with(tensor, unsqueezed(tensor.origin, dim % (tensor.dim() + 1)))


def _cat(tensors: Sequence[RecordedTensor], dim: int = 0) -> RecordedTensor:
    return _with(tensors[0], concatenated([each.origin for each in tensors], dim % tensors[0].dim()))


def _stack(tensors: Sequence[RecordedTensor], dim: int = 0) -> RecordedTensor:
    dim %= tensors[0].dim() + 1
    return _with(tensors[0], concatenated([unsqueezed(each.origin, dim) for each in tensors], dim))


def _reshape(tensor: RecordedTensor, shape: Sequence[int]) -> RecordedTensor:
    return _with(tensor, reshaped(tensor.origin, shape))


_MOVES: Mapping[str, Callable[..., Any]] = {
    "transpose": _transpose,
    "t": lambda tensor: _transpose(tensor, 0, 1) if tensor.dim() == 2 else _same(tensor),
    "permute": _permute,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "unbind": lambda tensor, dim=0: [_select(tensor, dim, index) for index in range(tensor.shape[dim])],
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshape),
    **dict.fromkeys(("detach", "alias", "clone", "contiguous", "_to_copy"), _same),
}
"""Operations that move elements, by their name in torch's ATen library. Casts keep the origin: they come at the end."""
