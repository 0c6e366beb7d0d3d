"""Tensors joined from the boxes of them that several files store."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from bigload.checkpoint.model import AssembledTensor, Piece, Span, StoredTensor, TensorInfo

MAX_COMPARISONS = 2_000_000
"""Pairs of boxes of one tensor that are compared. Shards of trainings lie in a grid and need about one each."""


def joined(name: str, pieces: Sequence[Piece], shape: Sequence[int] | None = None) -> StoredTensor:
    """Return the tensor `name` that `pieces`, at least one, are the boxes of: a stored tensor if it is only one.

    Without `shape`, it is as large as they reach. Pieces without elements are passed over.

    Raises:
        ValueError: they differ in dtype or dimensions, lie outside of the shape, leave elements out or hold some twice.
    """
    first = pieces[0].tensor
    if any(piece.tensor.dtype != first.dtype or len(piece.start) != len(first.shape) for piece in pieces):
        raise ValueError("its parts differ in dtype or number of dimensions")
    edges = [_edges(piece) for piece in pieces]
    reach = tuple(max(stop for _, stop in ranges) for ranges in zip(*edges, strict=True))
    whole = reach if shape is None else tuple(shape)
    if len(whole) != len(reach) or any(map(int.__gt__, reach, whole)):
        raise ValueError(f"its parts reach to {list(reach)}, outside of its shape {list(whole)}")
    held = [(piece, box) for piece, box in zip(pieces, edges, strict=True) if piece.tensor.num_elements]
    num_stored = sum(piece.tensor.num_elements for piece, _ in held)
    if num_stored != prod(whole):
        raise ValueError(f"its parts have {num_stored} elements, {list(whole)} has {prod(whole)}")
    _check_apart([box for _, box in held], len(whole))
    if not held:
        return TensorInfo(name, first.dtype, whole, Span(first.span.file, first.span.start, first.span.start))
    if len(held) == 1:
        only = held[0][0].tensor
        return TensorInfo(name, only.dtype, whole, only.span, only.strides)
    return AssembledTensor(name, first.dtype, whole, tuple(piece for piece, _ in held))


def _edges(piece: Piece) -> tuple[tuple[int, int], ...]:
    return tuple((first, first + size) for first, size in zip(piece.start, piece.tensor.shape, strict=True))


def _check_apart(boxes: Sequence[tuple[tuple[int, int], ...]], num_dims: int) -> None:
    """Raise if two boxes have an element in common: then, as many as are needed, they leave another one out."""
    if len(boxes) < 2:
        return
    if not num_dims:
        raise ValueError("several parts hold it")
    dim = max(range(num_dims), key=lambda dim: len({box[dim][0] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box[dim])
    if all(before[dim][1] <= after[dim][0] for before, after in pairwise(ordered)):
        return
    left = MAX_COMPARISONS
    for index, box in enumerate(ordered):
        for place in range(index + 1, len(ordered)):
            other, left = ordered[place], left - 1
            if other[dim][0] >= box[dim][1]:
                break
            if all(low < stop and start < high for (start, stop), (low, high) in zip(box, other, strict=True)):
                raise ValueError("two parts hold the same elements")
            if not left:
                raise ValueError(f"its {len(boxes)} parts lie in no grid, and are too many to compare each with each")
