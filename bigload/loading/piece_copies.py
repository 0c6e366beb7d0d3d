"""Copies that bring the pieces of an assembled tensor to their places in memory: arithmetic on strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from bigload.checkpoint.model import Piece


@dataclass(frozen=True, slots=True)
class PieceCopy:
    """`count` runs of `run` elements that follow each other in the file, each `stride` after the last.

    The first run begins `source` elements into the piece. In memory it goes to element `target` of the tensor, the next
    element of a run `target_step` further and the next run `target_stride`.
    """

    source: int
    run: int
    count: int
    stride: int
    target: int
    target_step: int
    target_stride: int


def strided_copies(piece: Piece, shape: Sequence[int]) -> Iterator[PieceCopy]:
    """Yield the copies of `piece` into a tensor of `shape`, row by row in memory; none if it has no elements."""
    target_strides = _row_strides(shape)
    strides = piece.tensor.strides or _row_strides(piece.tensor.shape)
    target = sum(index * stride for index, stride in zip(piece.start, target_strides, strict=True))
    (run, _, step), (count, stride, target_stride), *slow = _runs(
        list(zip(piece.tensor.shape, strides, target_strides, strict=True))
    )
    if not piece.tensor.num_elements:
        return
    for indices in product(*(range(size) for size, _, _ in reversed(slow))):
        pairs = list(zip(indices, reversed(slow), strict=True))
        yield PieceCopy(
            source=sum(index * apart for index, (_, apart, _) in pairs),
            run=run,
            count=count,
            stride=stride,
            target=target + sum(index * apart for index, (_, _, apart) in pairs),
            target_step=step,
            target_stride=target_stride,
        )


def _runs(dims: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return size, stride in the file and in memory of each dimension, the fastest of the file first.

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


def _row_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
