"""Copies that bring the pieces of a tensor, or of a part of it, to their places in memory: pure arithmetic on boxes.

A part is one box of the tensor or more, such as a rank holds of it. Files hold pieces, which are boxes as well. The
elements of the intersection of two boxes are byte ranges of the file; ranges of equal length at a constant stride, in
the file and in memory, are one `StridedCopy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from bigload.checkpoint.model import AssembledTensor, Piece
from bigload.conversion.strided_pieces import row_strides
from bigload.planning.tensor_parallel.division import Range

ShardSpec = tuple[tuple[Range, ...], ...]
"""The ranges of each dimension, in rising order; their product is held."""


def whole_spec(shape: Sequence[int]) -> ShardSpec:
    """Return the spec of a whole tensor."""
    return tuple(((0, size),) if size else () for size in shape)


def spec_shape(spec: ShardSpec) -> tuple[int, ...]:
    """Return the shape of the part."""
    return tuple(sum(stop - start for start, stop in ranges) for ranges in spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedCopy:
    """`count` ranges of `run_bytes` of `file`, from byte `start` on, each `stride` bytes after the last, to copy.

    In memory the first element goes to number `target` of the part, row by row, the next of its run `target_step`
    further, and the first of the next run `target_stride`.
    """

    file: str
    start: int
    run_bytes: int
    count: int
    stride: int
    target: int
    target_stride: int
    target_step: int

    @property
    def num_bytes(self) -> int:
        """Bytes to copy."""
        return self.count * self.run_bytes

    @property
    def reach(self) -> int:
        """Bytes from the first to the last, those between the ranges included."""
        return (self.count - 1) * self.stride + self.run_bytes


def strided_copies(tensor: AssembledTensor, spec: ShardSpec | None = None) -> Iterator[StridedCopy]:
    """Yield the copies that bring the elements in `spec` of `tensor`, or all, into a contiguous tensor."""
    spec = whole_spec(tensor.shape) if spec is None else spec
    target_strides = row_strides(spec_shape(spec))
    for box in product(*(_with_positions(ranges) for ranges in spec)):
        for piece in tensor.pieces:
            yield from _intersection(piece, box, target_strides, tensor.dtype.alignment)


def _with_positions(ranges: Sequence[Range]) -> list[tuple[int, int, int]]:
    """Return start and stop of each range, and its start in the part."""
    found = []
    position = 0
    for start, stop in ranges:
        found.append((start, stop, position))
        position += stop - start
    return found


def _intersection(
    piece: Piece, box: Sequence[tuple[int, int, int]], target_strides: Sequence[int], width: int
) -> Iterator[StridedCopy]:
    """Yield the copies of what `piece` has of `box`; an element takes `width` bytes."""
    shape = piece.tensor.shape
    strides = piece.tensor.strides or row_strides(shape)
    source = target = 0
    dims = []
    for (start, stop, position), first, size, stride, target_stride in zip(
        box, piece.start, shape, strides, target_strides, strict=True
    ):
        low, high = max(start, first), min(stop, first + size)
        if low >= high:
            return
        source += (low - first) * stride
        target += (position + low - start) * target_stride
        dims.append((high - low, stride, target_stride))
    span = piece.tensor.span
    (run, _, step), (count, stride, target_stride), *slow = _as_runs(dims)
    for indices in product(*(range(size) for size, _, _ in reversed(slow))):
        pairs = list(zip(indices, reversed(slow), strict=True))
        yield StridedCopy(
            file=span.file,
            start=span.start + (source + sum(index * apart for index, (_, apart, _) in pairs)) * width,
            run_bytes=run * width,
            count=count,
            stride=stride * width,
            target=target + sum(index * apart for index, (_, _, apart) in pairs),
            target_stride=target_stride,
            target_step=step,
        )


def _as_runs(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return size, distance in the file and in memory of each dimension, in elements, from the fastest of the file on.

    Those that continue each other in both are one. The first has neighbours of the file; there are at least two.
    """
    merged: list[tuple[int, int, int]] = []
    for size, stride, target_stride in sorted(dims, key=lambda dim: dim[1]):
        if size == 1:
            continue
        if merged:
            inner, apart, target_apart = merged[-1]
            if stride == inner * apart and target_stride == inner * target_apart:
                merged[-1] = (inner * size, apart, target_apart)
                continue
        merged.append((size, stride, target_stride))
    if not merged or merged[0][1] != 1:
        merged.insert(0, (1, 1, 1))
    if len(merged) == 1:
        merged.append((1, merged[0][0], merged[0][0]))
    return merged
