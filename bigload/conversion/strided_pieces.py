"""Pieces: strided boxes of stored tensors, and how views, concatenations and slices of tensors move them.

A tensor that is made of others by moving elements is a list of pieces. The functions below do to the list what the
operation of the same name does to the tensor. All numbers count elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple


class StridedPiece(NamedTuple):
    """A box of a tensor, of which all elements are those of one stored tensor.

    Attributes:
        source: Name of the stored tensor.
        offset: Number of the box's first element, counted in memory from the first one of the stored tensor on.
        start: Index of the box's first element in the tensor that is made.
        shape: Of the box.
        strides: Distance in the stored tensor from one element of the box to the next, along each of its dimensions.
    """

    source: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PiecedTensor:
    """A tensor of `shape` and the pieces that make it, each element in one of them."""

    shape: tuple[int, ...]
    pieces: tuple[StridedPiece, ...]

    @classmethod
    def of(cls, source: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> PiecedTensor:
        """Return a stored tensor as it is: row by row, or with `strides`."""
        whole = tuple(shape)
        apart = row_strides(whole) if strides is None else tuple(strides)
        return cls(whole, (StridedPiece(source, 0, (0,) * len(whole), whole, apart),))

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the stored tensors, each once, in the order of the pieces."""
        return tuple(dict.fromkeys(piece.source for piece in self.pieces))


def row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a tensor that is stored row by row."""
    return _row_strides(tuple(shape))


@lru_cache(maxsize=1024)
def _row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def permuted(tensor: PiecedTensor, order: Sequence[int]) -> PiecedTensor:
    """Return the tensor with its dimensions in the order `order`."""

    def turned(values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values[dim] for dim in order)

    pieces = tuple(
        StridedPiece(each.source, each.offset, turned(each.start), turned(each.shape), turned(each.strides))
        for each in tensor.pieces
    )
    return PiecedTensor(turned(tensor.shape), pieces)


def sliced(tensor: PiecedTensor, dim: int, start: int, stop: int, step: int = 1) -> PiecedTensor:
    """Return elements `start`, `start + step` … before `stop` along `dim`; they lie within the tensor."""
    pieces = []
    for each in tensor.pieces:
        begin, end = each.start[dim], each.start[dim] + each.shape[dim]
        first = max(-(-(begin - start) // step), 0)
        last = -(-(min(end, stop) - start) // step)
        if first < last:
            skipped = start + first * step - begin
            pieces.append(
                StridedPiece(
                    each.source,
                    each.offset + skipped * each.strides[dim],
                    _put(each.start, dim, first),
                    _put(each.shape, dim, last - first),
                    _put(each.strides, dim, each.strides[dim] * step),
                )
            )
    shape = _put(tensor.shape, dim, max(-(-(stop - start) // step), 0))
    return PiecedTensor(shape, tuple(pieces) or tuple(_empty(each, shape) for each in tensor.pieces[:1]))


def squeezed(tensor: PiecedTensor, dim: int) -> PiecedTensor:
    """Return the tensor without `dim`, which has one element."""
    pieces = tuple(
        StridedPiece(each.source, each.offset, _cut(each.start, dim), _cut(each.shape, dim), _cut(each.strides, dim))
        for each in tensor.pieces
    )
    return PiecedTensor(_cut(tensor.shape, dim), pieces)


def unsqueezed(tensor: PiecedTensor, dim: int) -> PiecedTensor:
    """Return the tensor with a dimension of one element before `dim`."""
    pieces = tuple(
        StridedPiece(
            each.source,
            each.offset,
            _insert(each.start, dim, 0),
            _insert(each.shape, dim, 1),
            _insert(each.strides, dim, 0),
        )
        for each in tensor.pieces
    )
    return PiecedTensor(_insert(tensor.shape, dim, 1), pieces)


def concatenated(tensors: Sequence[PiecedTensor], dim: int) -> PiecedTensor:
    """Return the tensors one after the other along `dim`.

    Raises:
        ValueError: their shapes differ in another dimension.
    """
    pieces: list[StridedPiece] = []
    position = 0
    for tensor in tensors:
        if _cut(tensor.shape, dim) != _cut(tensors[0].shape, dim):
            shapes = f"{list(tensors[0].shape)} and {list(tensor.shape)}"
            raise ValueError(f"tensors of shapes {shapes} cannot be joined along dimension {dim}")
        for each in tensor.pieces:
            start = _put(each.start, dim, each.start[dim] + position)
            pieces.append(StridedPiece(each.source, each.offset, start, each.shape, each.strides))
        position += tensor.shape[dim]
    return PiecedTensor(_put(tensors[0].shape, dim, position), tuple(pieces))


def reshaped(tensor: PiecedTensor, shape: Sequence[int]) -> PiecedTensor:
    """Return the tensor with the same elements, row by row, in another shape.

    Raises:
        ValueError: the shape has another number of elements.
    """
    wanted = _without_minus_one(shape, prod(tensor.shape))
    if prod(wanted) != prod(tensor.shape):
        raise ValueError(f"a tensor of shape {list(tensor.shape)} cannot become one of {list(wanted)}")
    made = tensor
    if not prod(wanted):
        return PiecedTensor(wanted, tuple(_empty(each, wanted) for each in tensor.pieces[:1]))
    for dim, (before, after) in _groups(tensor.shape, wanted):
        if before != after:
            made = _regrouped(made, dim, before, after)
    return made


def _empty(piece: StridedPiece, shape: tuple[int, ...]) -> StridedPiece:
    return StridedPiece(piece.source, 0, (0,) * len(shape), shape, row_strides(shape))


def _groups(
    before: Sequence[int], after: Sequence[int]
) -> Iterator[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Yield the shortest runs of dimensions with as many elements in both shapes, and where each begins in `after`."""
    i = j = 0
    while i < len(before) or j < len(after):
        first = j
        old, new = [*before[i : i + 1]], [*after[j : j + 1]]
        i, j = i + 1, j + 1
        while prod(old) != prod(new):
            if prod(old) < prod(new):
                old.append(before[i])
                i += 1
            else:
                new.append(after[j])
                j += 1
        i, j = min(i, len(before)), min(j, len(after))
        yield first, (tuple(old), tuple(new))


def _regrouped(tensor: PiecedTensor, dim: int, before: tuple[int, ...], after: tuple[int, ...]) -> PiecedTensor:
    """Return the tensor with the dimensions `before`, from `dim` on, as `after`: all in one, then that one cut up."""
    pieces: list[StridedPiece] = list(tensor.pieces)
    if not before:
        return unsqueezed(tensor, dim)
    for inner in range(len(before) - 1, 0, -1):
        size = prod(before[inner:])
        pieces = [merged for each in pieces for merged in _merged(each, dim + inner - 1, size)]
    for inner in range(1, len(after)):
        size = prod(after[inner:])
        pieces = [part for each in pieces for part in _divided(each, dim + inner - 1, size)]
    shape = (*tensor.shape[:dim], *after, *tensor.shape[dim + len(before) :])
    made = PiecedTensor(shape if after else (*tensor.shape[:dim], 1, *tensor.shape[dim + len(before) :]), tuple(pieces))
    return made if after else squeezed(made, dim)


def _merged(piece: StridedPiece, dim: int, size: int) -> Iterator[StridedPiece]:
    """Yield what `piece` becomes when `dim` and the next dimension, of `size` elements, are one."""
    rows, columns = piece.shape[dim], piece.shape[dim + 1]
    row_stride, column_stride = piece.strides[dim], piece.strides[dim + 1]
    first = piece.start[dim] * size + piece.start[dim + 1]
    if rows == 1:
        yield _joined(piece, dim, first, columns, column_stride)
    elif columns == size and (columns == 1 or row_stride == column_stride * size):
        yield _joined(piece, dim, first, rows * columns, column_stride if columns > 1 else row_stride)
    else:
        for row in range(rows):
            below = piece._replace(offset=piece.offset + row * row_stride)
            yield _joined(below, dim, first + row * size, columns, column_stride)


def _joined(piece: StridedPiece, dim: int, start: int, size: int, stride: int) -> StridedPiece:
    return StridedPiece(
        piece.source,
        piece.offset,
        (*piece.start[:dim], start, *piece.start[dim + 2 :]),
        (*piece.shape[:dim], size, *piece.shape[dim + 2 :]),
        (*piece.strides[:dim], stride, *piece.strides[dim + 2 :]),
    )


def _divided(piece: StridedPiece, dim: int, size: int) -> Iterator[StridedPiece]:
    """Yield what `piece` becomes when `dim` is cut into rows of `size`: part of one, whole ones, part of one."""
    first, stop, stride = piece.start[dim], piece.start[dim] + piece.shape[dim], piece.strides[dim]
    begin = first
    while begin < stop:
        row, column = divmod(begin, size)
        whole = 0 if column else (stop - begin) // size
        rows, columns = (whole, size) if whole else (1, min(size - column, stop - begin))
        yield StridedPiece(
            piece.source,
            piece.offset + (begin - first) * stride,
            (*piece.start[:dim], row, column, *piece.start[dim + 1 :]),
            (*piece.shape[:dim], rows, columns, *piece.shape[dim + 1 :]),
            (*piece.strides[:dim], stride * size, stride, *piece.strides[dim + 1 :]),
        )
        begin += rows * columns


class StoredBox(NamedTuple):
    """A piece that is a box of its stored tensor too: every `steps[dim]`-th element from `first` on.

    Attributes:
        axes: For each dimension of the piece the one of the stored tensor along which it goes; `None` if it has one
            element.
    """

    piece: StridedPiece
    first: tuple[int, ...]
    axes: tuple[int | None, ...]
    steps: tuple[int, ...]


def boxes_of(piece: StridedPiece, shape: Sequence[int]) -> Iterator[StoredBox]:
    """Yield the fewest boxes of the stored tensor of `shape`, which counts row by row, that make `piece`."""
    if not prod(piece.shape):
        return
    apart = row_strides(shape)
    first = tuple(piece.offset // stride % size for size, stride in zip(shape, apart, strict=True))
    axes: list[int | None] = [None] * len(piece.shape)
    steps = [1] * len(piece.shape)
    for dim in sorted(range(len(piece.shape)), key=lambda dim: piece.strides[dim]):
        count, stride = piece.shape[dim], piece.strides[dim]
        if count == 1:
            continue
        axis = next(each for each, step in enumerate(apart) if shape[each] > 1 and step <= stride)
        steps[dim], rest = divmod(stride, apart[axis])
        room = 1 if rest or axis in axes else (shape[axis] - 1 - first[axis]) // steps[dim] + 1
        if count > room:  # goes on in the next row
            for begin, end in ((0, room), (room, count)):
                offset = piece.offset + begin * stride
                start = _put(piece.start, dim, piece.start[dim] + begin)
                cut = piece._replace(offset=offset, start=start, shape=_put(piece.shape, dim, end - begin))
                yield from boxes_of(cut, shape)
            return
        axes[dim] = axis
    yield StoredBox(piece, first, tuple(axes), tuple(steps))


def intersection(
    box: StoredBox, start: Sequence[int], shape: Sequence[int], strides: Sequence[int] | None
) -> StridedPiece | None:
    """Return what a part of the stored tensor, of `shape` from index `start` on, has of `box`; offsets are its own."""
    apart = row_strides(shape) if strides is None else strides
    free = [axis for axis in range(len(shape)) if axis not in box.axes]
    if not all(start[axis] <= box.first[axis] < start[axis] + shape[axis] for axis in free):
        return None
    offset = sum((box.first[axis] - start[axis]) * apart[axis] for axis in free)
    begins, sizes, steps = list(box.piece.start), list(box.piece.shape), [0] * len(box.axes)
    for dim, axis in enumerate(box.axes):
        if axis is None:
            continue
        first, step = box.first[axis] - start[axis], box.steps[dim]
        low = max(-(first // step), 0)  # rounded up
        high = min(-((first - shape[axis]) // step), sizes[dim])
        if low >= high:
            return None
        offset += (first + low * step) * apart[axis]
        begins[dim] += low
        sizes[dim] = high - low
        steps[dim] = step * apart[axis]
    return StridedPiece(box.piece.source, offset, tuple(begins), tuple(sizes), tuple(steps))


def _without_minus_one(shape: Sequence[int], num_elements: int) -> tuple[int, ...]:
    if -1 not in shape:
        return tuple(shape)
    others = prod(size for size in shape if size != -1)
    return tuple(num_elements // others if size == -1 and others else max(size, 0) for size in shape)


def _put(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])


def _cut(values: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _insert(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim:])
