"""Byte ranges and strides of parts of views that are not stored row by row (transposed, cut out, expanded).

Only torch files have such views. To write one row by row, a window of it is read in the order of the file, run by run,
into memory without what lies between the runs, and put in order from there: a transposed matrix is not read once for
every row, and never as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from bigload.checkpoint.model import TensorInfo
from bigload.loading.scheduling.slices import Slice, StridedRange

Box = tuple[tuple[int, int], ...]
"""First and last (exclusive) index along each dimension."""

_MAX_SPREAD = 2
"""Elements along a dimension are read with what lies between them if that at most doubles what is read."""


class ViewPart(NamedTuple):
    """Some elements of a view: how to read them, and from where to where each of them goes.

    Attributes:
        rows: What to read, one after the other into memory.
        shape: Of the elements, with `strides` (in elements) in the memory that was read.
        start: Number of the first one in what was asked for, row by row, where they have `target_strides`.
    """

    rows: _NestedRanges
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    target_strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _NestedRanges:
    """Runs of `run_bytes`, the first at byte `start`: one for each index of `outer`, pairs of size and bytes apart."""

    start: int
    run_bytes: int
    outer: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return self.run_bytes * prod(size for size, _ in self.outer)

    def __iter__(self) -> Iterator[StridedRange]:
        *slow, (count, stride) = self.outer or ((1, self.run_bytes),)
        for indices in product(*(range(size) for size, _ in slow)):
            skipped = sum(index * step for index, (_, step) in zip(indices, slow, strict=True))
            yield StridedRange(self.start + skipped, self.run_bytes, count, stride)


def view_parts(tensor: TensorInfo, parts: Sequence[Slice], start: int, stop: int) -> Iterator[ViewPart]:
    """Yield what makes elements `start` to `stop`, row by row, of `parts` of a view, joined along their dimension.

    Without parts, of all of it. The dtype fills whole bytes.
    """
    sizes = list(tensor.shape) or [1]  # one number is a row of one
    parts = parts or [Slice(0, 0, sizes[0])]
    dim = parts[0].dim
    sizes[dim] = sum(part.stop - part.start for part in parts)
    for box, first in boxes_between(tuple(sizes), start, stop):
        lengths = [high - low for low, high in box]
        target_strides = tuple(prod(lengths[axis + 1 :]) for axis in range(len(lengths)))
        position = 0
        for part in parts:
            low = max(box[dim][0], position)
            high = min(box[dim][1], position + part.stop - part.start)
            if low < high:
                shift = part.start - position
                taken = (*box[:dim], (low + shift, high + shift), *box[dim + 1 :])
                skipped = (low - box[dim][0]) * target_strides[dim]
                yield _part(tensor, taken, first - start + skipped, target_strides)
            position += part.stop - part.start


def boxes_between(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield boxes that together are elements `start` to `stop`, row by row, and the number of the first one of each.

    At most two for each dimension: what is left of a row at both ends, and whole rows between.
    """
    inner = prod(sizes[1:])
    while start < stop:
        row, skipped = divmod(start, inner)
        whole = 0 if skipped else (stop - start) // inner
        if whole:
            yield ((row, row + whole), *((0, size) for size in sizes[1:])), start
            start += whole * inner
            continue
        end = min(stop, (row + 1) * inner)
        for box, first in boxes_between(sizes[1:], skipped, end - row * inner):
            yield ((row, row + 1), *box), row * inner + first
        start = end


def _part(tensor: TensorInfo, box: Box, start: int, target_strides: tuple[int, ...]) -> ViewPart:
    stored = tensor.strides or (1,)
    width = tensor.dtype.bits // 8
    shape = tuple(high - low for low, high in box)
    offset = sum(low * stride for (low, _), stride in zip(box, stored, strict=True))
    axes = [axis for axis, size in enumerate(shape) if size > 1 and stored[axis]]
    strides = [0] * len(shape)
    extent = num_elements = 1
    outer: list[int] = []
    for axis in sorted(axes, key=lambda axis: stored[axis]):
        wider = (shape[axis] - 1) * stored[axis] + extent
        num_elements *= shape[axis]
        if not outer and wider <= _MAX_SPREAD * num_elements:
            strides[axis], extent = stored[axis], wider
        else:
            outer.append(axis)
    step = extent
    for axis in outer:
        strides[axis] = step
        step *= shape[axis]
    runs = _NestedRanges(
        start=tensor.span.start + offset * width,
        run_bytes=extent * width,
        outer=tuple((shape[axis], stored[axis] * width) for axis in reversed(outer)),
    )
    return ViewPart(rows=runs, shape=shape, strides=tuple(strides), start=start, target_strides=target_strides)
