"""Pipeline stages: the steps of a forward pass cut into contiguous ranges, so that the fullest stage is least full.

A stage holds each unit once, however often it runs there; a unit that runs in several stages is held by each of them,
as an embedding that is the head too. What a range holds never shrinks as the range grows, so filling stages one after
another up to a bound takes the fewest of them, and the least bound is found by halving over bytes: it is exact.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate


@dataclass(frozen=True)
class StageSizes:
    """Steps of a forward pass with what they hold.

    Attributes:
        units: The unit that runs in each step.
        held_bytes: Of the unit of each step, held once by a stage.
        own_bytes: Of each step besides: what a unit holds in one of its steps only.
        starts: Steps at which a stage may begin, ascending from 0; none for no steps.
    """

    units: tuple[int, ...]
    held_bytes: tuple[int, ...]
    own_bytes: tuple[int, ...]
    starts: tuple[int, ...]

    @cached_property
    def _sums(self) -> list[int]:
        both = (held + own for held, own in zip(self.held_bytes, self.own_bytes, strict=True))
        return [0, *accumulate(both)]

    @cached_property
    def _repeated(self) -> list[tuple[int, int]]:
        """Steps whose unit has run before, each with the last step of it before."""
        last: dict[int, int] = {}
        found = []
        for step, unit in enumerate(self.units):
            if unit in last:
                found.append((last[unit], step))
            last[unit] = step
        return found

    @property
    def num_pieces(self) -> int:
        """Ranges that are not cut; a stage has one or more of them."""
        return len(self.starts)

    def steps(self, first: int, stop: int) -> range:
        """Return the steps of the pieces from `first` to `stop`."""
        return range(self._step(first), self._step(stop))

    def num_bytes(self, first: int, stop: int) -> int:
        """Return what a stage of the pieces from `first` to `stop` holds."""
        begin, end = self._step(first), self._step(stop)
        twice = (self.held_bytes[step] for before, step in self._repeated if begin <= before and step < end)
        return self._sums[end] - self._sums[begin] - sum(twice)

    def _step(self, piece: int) -> int:
        return self.starts[piece] if piece < len(self.starts) else len(self.units)


def cut_into_stages(sizes: StageSizes, num_stages: int) -> tuple[int, ...]:
    """Return where stages begin, and the end, in pieces: the largest stage is as small as it can be.

    Among such cuts the stages are as even as can be reached by choosing them in order.

    Raises:
        ValueError: there are fewer pieces than stages.
    """
    num_pieces = sizes.num_pieces
    if not 1 <= num_stages <= num_pieces:
        raise ValueError(f"{num_stages} stages of {num_pieces} pieces")
    largest = max(sizes.num_bytes(piece, piece + 1) for piece in range(num_pieces))
    whole = range(sizes.num_bytes(0, num_pieces) + 1)
    bound = bisect_left(whole, x=True, lo=largest, key=lambda bound: _num_stages(sizes, bound) <= num_stages)
    needed = [0] * (num_pieces + 1)
    for piece in reversed(range(num_pieces)):
        needed[piece] = 1 + needed[_reach(sizes, piece, bound)]
    cuts = [0]
    for left in range(num_stages - 1, 0, -1):
        first = cuts[-1]
        even = sizes.num_bytes(first, num_pieces) / (left + 1)
        last = min(_reach(sizes, first, bound), num_pieces - left)
        ends = [end for end in range(first + 1, last + 1) if needed[end] <= left]
        cuts.append(min(ends, key=lambda end: abs(sizes.num_bytes(first, end) - even)))
    return (*cuts, num_pieces)


def _reach(sizes: StageSizes, first: int, bound: int) -> int:
    """Return how far a stage of at most `bound` bytes reaches that begins with the piece `first`."""
    ends: Sequence[int] = range(sizes.num_pieces + 1)
    return bisect_right(ends, bound, lo=first + 1, key=lambda end: sizes.num_bytes(first, end)) - 1


def _num_stages(sizes: StageSizes, bound: int) -> int:
    """Return how many stages of at most `bound` bytes, which holds every piece, are needed."""
    number = piece = 0
    while piece < sizes.num_pieces:
        number, piece = number + 1, _reach(sizes, piece, bound)
    return number
