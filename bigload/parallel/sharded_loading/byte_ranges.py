"""Where in the files the elements lie that a rank holds, and where they go: pure arithmetic on boxes of tensors.

A rank holds a box of a tensor, or several. A file holds the tensor, or a box of it: what a rank of a training saved.
Where two such boxes meet, there is a third. Its elements are runs of bytes in the file; those that have one length and
are one distance apart, there and in memory, are `Lines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType
from bigload.loading.tensors import torch_shape
from bigload.parallel.sharded_loading.shard_spec import Spans, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A box of a tensor as one file holds it; `start` is the index of its first element in the whole tensor."""

    start: tuple[int, ...]
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor, and the pieces that hold it, each element once. Shapes are torch's: of packed types, pairs count."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @classmethod
    def of(cls, tensor: TensorInfo) -> StoredTensor:
        """Return a tensor that one file holds."""
        shape = torch_shape(tensor.dtype, tensor.shape)
        piece = StoredPiece(start=(0,) * len(shape), tensor=tensor)
        return cls(name=tensor.name, dtype=tensor.dtype, shape=shape, pieces=(piece,))

    @property
    def item_bytes(self) -> int:
        """Bytes of an element, as torch counts them."""
        return max(self.dtype.bits // 8, 1)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """`count` runs of `run_bytes` of `file`, the first from byte `start` on, each `stride` bytes after the last.

    In memory the first element goes to number `target` of the local tensor, row by row, the next of its run
    `target_step` further, and the first of the next run `target_stride`.
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
        """Bytes that are wanted."""
        return self.count * self.run_bytes

    @property
    def reach(self) -> int:
        """Bytes from the first to the last, those between the runs included."""
        return (self.count - 1) * self.stride + self.run_bytes


def lines_of(stored: StoredTensor, spans: Spans) -> Iterator[Lines]:
    """Yield what brings the elements in `spans` of `stored` into a local tensor of their shape, row by row."""
    target_strides = _strides(shape_of(spans))
    for box in product(*(_with_positions(ranges) for ranges in spans)):
        for piece in stored.pieces:
            yield from _meeting(stored, piece, box, target_strides)


def _with_positions(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return start and stop of each range, and where it begins in the local tensor."""
    found = []
    position = 0
    for start, stop in ranges:
        found.append((start, stop, position))
        position += stop - start
    return found


def _meeting(
    stored: StoredTensor, piece: StoredPiece, box: Sequence[tuple[int, int, int]], target_strides: Sequence[int]
) -> Iterator[Lines]:
    """Yield what `piece` has of `box`."""
    shape = torch_shape(piece.tensor.dtype, piece.tensor.shape)
    strides = piece.tensor.strides or _strides(shape)
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
    span, width = piece.tensor.span, stored.item_bytes
    (run, _, step), (count, stride, target_stride), *slow = _as_runs(dims)
    for indices in product(*(range(size) for size, _, _ in reversed(slow))):
        pairs = list(zip(indices, reversed(slow), strict=True))
        yield Lines(
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


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
