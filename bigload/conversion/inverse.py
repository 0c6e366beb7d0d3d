"""The way back from the tensors of a model to the stored ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod

from bigload.conversion.strided_pieces import PiecedTensor, StridedPiece, row_strides

_Dim = tuple[int, int, int]
"""Size of a dimension of a piece, and its distance in the stored tensor and in the one that is made."""


def inverse_of(
    tensors: Mapping[str, PiecedTensor], stored: Mapping[str, tuple[int, ...]]
) -> Mapping[str, PiecedTensor]:
    """Return what those of the `stored` tensors, given by their shapes, are made of that are wholly in `tensors`.

    `tensors` are made of stored ones, which lie row by row, and so will they. Of several tensors that each hold all of
    a stored one, the first is taken. The shape of one whose rows or elements take turns has more dimensions than the
    stored one, which it equals row by row: even and odd rows of `(n, m)` are two boxes of `(n / 2, 2, m)`.
    """
    stored = _divided_shapes(tensors, stored)
    found: dict[str, dict[str, list[StridedPiece]]] = {}
    for name, tensor in tensors.items():
        distances = row_strides(tensor.shape)
        for piece in tensor.pieces:
            first = sum(index * distance for index, distance in zip(piece.start, distances, strict=True))
            dims = list(zip(piece.shape, piece.strides, distances, strict=True))
            parts = _boxes(name, piece.offset, first, dims, stored[piece.source])
            found.setdefault(piece.source, {}).setdefault(name, []).extend(parts)
    inverse = {}
    for source, by_name in found.items():
        shape = stored[source]
        if not prod(shape):
            inverse[source] = PiecedTensor.of(next(iter(by_name)), shape)
            continue
        together = [piece for several in by_name.values() for piece in several]
        for pieces in (*by_name.values(), together) if len(by_name) > 1 else (together,):
            are_distinct = len({piece.start for piece in pieces}) == len(pieces)
            if are_distinct and sum(prod(piece.shape) for piece in pieces) == prod(shape):
                inverse[source] = PiecedTensor(shape, tuple(sorted(pieces, key=lambda piece: piece.start)))
                break
    return inverse


def _divided_shapes(
    tensors: Mapping[str, PiecedTensor], stored: Mapping[str, tuple[int, ...]]
) -> Mapping[str, tuple[int, ...]]:
    """Return the stored shapes, divided where pieces take only every second element of a dimension, or third."""
    steps: dict[str, set[int]] = {}
    for tensor in tensors.values():
        for piece in tensor.pieces:
            found = (step for size, step in zip(piece.shape, piece.strides, strict=True) if size > 1)
            steps.setdefault(piece.source, set()).update(found)
    return {name: _divided(tuple(shape), tuple(sorted(steps.get(name, ())))) for name, shape in stored.items()}


@lru_cache(maxsize=1024)
def _divided(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...]:
    for step in steps:
        for dim, stride in enumerate(row_strides(shape)):
            times, rest = divmod(step, stride) if stride else (0, 0)
            if 1 < times < shape[dim] and not rest and not shape[dim] % times:
                shape = (*shape[:dim], shape[dim] // times, times, *shape[dim + 1 :])
                break
    return shape


def _boxes(name: str, offset: int, first: int, dims: list[_Dim], shape: tuple[int, ...]) -> Iterator[StridedPiece]:
    """Yield the boxes of a stored tensor of `shape` that elements `offset` and on fill, `dims` apart in it.

    Element `first` of the tensor `name` is element `offset` of the stored one.
    """
    strides = row_strides(shape)
    start, rest = [], offset
    for stride in strides:
        index, rest = divmod(rest, stride) if stride else (0, rest)
        start.append(index)
    sizes, distances = [1] * len(shape), [0] * len(shape)
    for number, (size, stride, distance) in enumerate(dims):
        if size == 1:
            continue
        dim = next((dim for dim in range(len(shape)) if strides[dim] == stride and shape[dim] > 1), None)
        if dim is not None and sizes[dim] == 1 and start[dim] + size <= shape[dim]:
            sizes[dim], distances[dim] = size, distance
            continue
        others = [*dims[:number], *dims[number + 1 :]]
        if dim is not None and start[dim] == 0 and size % shape[dim] == 0:  # several dimensions of the stored one
            inner = shape[dim]
            divided = [(size // inner, stride * inner, distance * inner), (inner, stride, distance), *others]
            yield from _boxes(name, offset, first, divided, shape)
            return
        for index in range(size):
            yield from _boxes(name, offset + index * stride, first + index * distance, others, shape)
        return
    yield StridedPiece(name, first, tuple(start), tuple(sizes), tuple(distances))
