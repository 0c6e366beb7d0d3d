"""Slices of tensors along one dimension, and the byte ranges that hold them: arithmetic on row-major layouts.

Rows of a matrix are one byte range. Columns are many: one in each row, all of one length, one row's length apart.
So is a part along any dimension of any tensor, with the dimensions before it taken together as rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from bigload.checkpoint.model import AssembledTensor, Piece, Span, TensorInfo


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` (exclusive) along dimension `dim`; all of the other dimensions."""

    dim: int
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.dim < 0 or not 0 <= self.start <= self.stop:
            raise ValueError(f"{self}: expected a dimension of 0 or more and 0 <= start <= stop")


@dataclass(frozen=True, slots=True)
class StridedRange:
    """`count` stretches of `row_bytes` bytes of a file: the first begins at `start`, each `stride` after the last."""

    start: int
    row_bytes: int
    count: int
    stride: int

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * self.count

    def between(self, start: int, stop: int) -> Iterator[StridedRange]:
        """Yield what holds bytes `start` to `stop` of these rows: the end of one, whole ones, the beginning of one."""
        while start < stop:
            row, skipped = divmod(start, self.row_bytes)
            whole = 0 if skipped else (stop - start) // self.row_bytes
            length = self.row_bytes if whole else min(self.row_bytes - skipped, stop - start)
            yield StridedRange(
                self.start + row * self.stride + skipped, length, whole or 1, self.stride if whole > 1 else length
            )
            start += length * (whole or 1)


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def sliced_shape(tensor: _Shaped, part: Slice | None) -> tuple[int, ...]:
    """Return the shape of `part` of `tensor`; of all of it when `part` is `None`.

    Raises:
        ValueError: the tensor has no such dimension, or not so many elements along it.
    """
    if part is None:
        return tensor.shape
    if part.dim >= len(tensor.shape):
        raise ValueError(f"dimension {part.dim} of a tensor of shape {list(tensor.shape)}")
    if part.stop > tensor.shape[part.dim]:
        raise ValueError(f"elements {part.start} to {part.stop} along dimension {part.dim} of {list(tensor.shape)}")
    return (*tensor.shape[: part.dim], part.stop - part.start, *tensor.shape[part.dim + 1 :])


def rows_of(tensor: TensorInfo, part: Slice | None) -> StridedRange:
    """Return which bytes of the file hold `part` of `tensor`, in the order in which they lie in memory afterwards.

    Columns 2 and 3 of a [3, 8] matrix of 2-byte elements at byte 100: 4 bytes from 104, 120 and 136 on.

    Raises:
        ValueError: there is no such part, or it begins or ends inside a byte (packed 4-bit elements).
    """
    if part is None:
        return StridedRange(tensor.span.start, tensor.span.num_bytes, 1, tensor.span.num_bytes)
    shape = sliced_shape(tensor, part)
    inner_bits = prod(tensor.shape[part.dim + 1 :]) * tensor.dtype.bits
    edges = (part.start * inner_bits, part.stop * inner_bits, tensor.shape[part.dim] * inner_bits)
    if any(edge % 8 for edge in edges):
        raise ValueError(f"{part} of {list(tensor.shape)} cuts through bytes of packed {tensor.dtype.name}")
    start, stop, stride = (edge // 8 for edge in edges)
    count, row_bytes = prod(shape[: part.dim]), stop - start
    if count <= 1 or row_bytes == stride:  # rows without gaps are one stretch
        return StridedRange(tensor.span.start + start, row_bytes * count, 1, row_bytes * count)
    return StridedRange(tensor.span.start + start, row_bytes, count, stride)


def rows_between(tensor: TensorInfo, parts: Sequence[Slice], start: int, stop: int) -> Iterator[StridedRange]:
    """Yield which bytes of the file hold bytes `start` to `stop` of `parts` along one dimension, joined along it.

    Without parts, of the whole tensor. In the order in which they lie in memory afterwards: of parts that are columns,
    those of one row before those of the next.
    """
    if len(parts) < 2:
        yield from rows_of(tensor, parts[0] if parts else None).between(start, stop)
        return
    count = prod(tensor.shape[: parts[0].dim])
    if start >= stop or count == 0:
        return
    stride = tensor.span.num_bytes // count
    columns = [(rows.start, rows.num_bytes // count) for rows in (rows_of(tensor, part) for part in parts)]
    width = sum(length for _, length in columns)
    for row in range(start // width, -(-stop // width)):
        position = row * width
        for first, length in columns:
            begin, end = max(start, position), min(stop, position + length)
            if begin < end:
                yield StridedRange(first + row * stride + begin - position, end - begin, 1, end - begin)
            position += length


def source_rows(shape: Sequence[int], parts: Sequence[Slice], first: int, last: int) -> Iterator[tuple[int, int, int]]:
    """Yield which rows of a tensor are rows `first` to `last` of its `parts`: number of the first, start, stop.

    Rows are vectors along the last dimension, and the parts are joined along theirs. No parts are the whole tensor.
    """
    if not parts or parts[0].dim == len(shape) - 1:
        yield first, first, last
        return
    dim = parts[0].dim
    inner = prod(shape[dim + 1 : -1])
    lengths = [(part.stop - part.start) * inner for part in parts]
    while first < last:
        outer, left = divmod(first, sum(lengths))
        for part, length in zip(parts, lengths, strict=True):
            if left < length:
                start = (outer * shape[dim] + part.start) * inner + left
                stop = start + min(length - left, last - first)
                yield first, start, stop
                first += stop - start
                break
            left -= length


def cut_out(tensor: AssembledTensor, part: Slice) -> AssembledTensor:
    """Return `part` of `tensor`, made of what its pieces have of it.

    Raises:
        ValueError: there is no such part.
    """
    shape = sliced_shape(tensor, part)
    cuts = [cut for piece in tensor.pieces if (cut := _cut_piece(piece, part)) is not None]
    if not cuts:  # nothing is left; as with a tensor that has no elements, a piece says of which file
        whole = tensor.pieces[0].tensor
        span = whole.span._replace(stop=whole.span.start)
        cuts = [Piece((0,) * len(shape), replace(whole, shape=shape, span=span, strides=None))]
    return replace(tensor, shape=shape, pieces=tuple(cuts))


def _cut_piece(piece: Piece, part: Slice) -> Piece | None:
    dim, stored = part.dim, piece.tensor
    first = max(part.start, piece.start[dim])
    size = min(part.stop, piece.start[dim] + stored.shape[dim]) - first
    if size <= 0:
        return None
    shape = (*stored.shape[:dim], size, *stored.shape[dim + 1 :])
    strides = stored.strides or tuple(prod(stored.shape[inner + 1 :]) for inner in range(len(shape)))
    reach = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    begin = stored.span.start + (first - piece.start[dim]) * strides[dim] * stored.dtype.alignment
    span = Span(stored.span.file, begin, begin + reach * stored.dtype.alignment)
    is_by_row = stored.strides is None and dim == 0
    cut = replace(stored, shape=shape, span=span, strides=None if is_by_row else strides)
    return Piece((*piece.start[:dim], first - part.start, *piece.start[dim + 1 :]), cut)
