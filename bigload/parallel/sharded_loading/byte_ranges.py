"""Byte ranges of files that hold a rank's elements, and their destinations: pure arithmetic on boxes of tensors.

A rank holds one box of a tensor or more. A file holds the tensor, or a box of it, saved by a rank of a training. The
elements of the intersection of two boxes are byte ranges of the file; ranges of equal length at a constant stride, in
the file and in memory, are one `StridedCopy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType
from bigload.loading.tensors import torch_shape
from bigload.parallel.sharded_loading.shard_spec import ShardSpec, spec_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A box of a tensor as one file holds it; `start` is the index of its first element in the whole tensor."""

    start: tuple[int, ...]
    tensor: TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor and the pieces that hold it, each element once. Shapes are torch's: packed types count pairs."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]

    @classmethod
    def of(cls, tensor: TensorInfo) -> StoredTensor:
        """Return the tensor that one file holds as a whole."""
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

    @property
    def num_rows(self) -> int:
        """Length of the first dimension; 1 of a single number."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StridedCopy:
    """`count` ranges of `run_bytes` of `file`, from byte `start` on, each `stride` bytes after the last, to copy.

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
        """Bytes to copy."""
        return self.count * self.run_bytes

    @property
    def reach(self) -> int:
        """Bytes from the first to the last, those between the ranges included."""
        return (self.count - 1) * self.stride + self.run_bytes


def strided_copies(stored: StoredTensor, spec: ShardSpec) -> Iterator[StridedCopy]:
    """Yield the copies that bring the elements in `spec` of `stored` into a contiguous tensor of their shape."""
    target_strides = _strides(spec_shape(spec))
    for box in product(*(_with_positions(ranges) for ranges in spec)):
        for piece in stored.pieces:
            yield from _intersection(stored, piece, box, target_strides)


def _with_positions(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Return start and stop of each range, and its start in the local tensor."""
    found = []
    position = 0
    for start, stop in ranges:
        found.append((start, stop, position))
        position += stop - start
    return found


def _intersection(
    stored: StoredTensor, piece: StoredPiece, box: Sequence[tuple[int, int, int]], target_strides: Sequence[int]
) -> Iterator[StridedCopy]:
    """Yield the copies of what `piece` has of `box`."""
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


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
