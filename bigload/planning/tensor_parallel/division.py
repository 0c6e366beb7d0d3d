"""Division of one tensor among tensor-parallel ranks: a dimension, and the ranges of it that each rank holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

MAX_RANKS = 1024

Range = tuple[int, int]
"""Elements from the first number to the second (exclusive) along a dimension."""

RankRanges = tuple[tuple[Range, ...], ...]
"""Ranges of each rank."""


@dataclass(frozen=True, slots=True)
class Division:
    """Parts of a tensor by rank.

    Attributes:
        dim: The divided dimension; `None` if every rank holds the whole tensor.
        ranges: For each rank the elements along `dim` that it holds, one range after the other; a rank without any has
            one empty range. Empty where `dim` is `None`. Ranks may hold the same elements.
    """

    dim: int | None = None
    ranges: RankRanges = ()

    def shape(self, full: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of the part that `rank` holds of a tensor of shape `full`."""
        if self.dim is None:
            return full
        return (*full[: self.dim], self.length(rank), *full[self.dim + 1 :])

    def length(self, rank: int) -> int:
        """Return the number of elements along `dim` that `rank` holds."""
        return sum(stop - start for start, stop in self.ranges[rank])

    @property
    def is_shared(self) -> bool:
        """Whether two ranks hold the same elements."""
        ends = [edge for of_rank in self.ranges for pair in of_rank for edge in pair]
        return bool(ends) and sum(map(self.length, range(len(self.ranges)))) > max(ends) - min(ends)


WHOLE = Division()


def chunks(size: int, num_ranks: int, first: int = 0) -> RankRanges:
    """Return `size` elements from `first` on as `torch.chunk` and DTensor's `Shard` divide them.

    Pieces have ceil(size / ranks) elements; the last ones are shorter, or empty.
    """
    step = -(-size // num_ranks)
    edges = [first + min(rank * step, size) for rank in range(num_ranks + 1)]
    return tuple((edge,) for edge in pairwise(edges))


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return `ranges` without empty ones, neighbours as one."""
    found: list[Range] = []
    for start, stop in ranges:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif stop > start:
            found.append((start, stop))
    return tuple(found)
