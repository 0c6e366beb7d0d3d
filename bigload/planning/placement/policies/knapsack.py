"""Choose which of many like things to keep where memory is scarce: a bounded knapsack with two bins.

The blocks of a model come in few sizes, so the choice is one of counts per size, not of blocks: a search over counts
with a bound (branch and bound) ends after a few steps where one over blocks would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_STEPS = 1_000
"""Counts looked at before the best choice so far is taken. Only models with very many unlike blocks get there."""


@dataclass(frozen=True, slots=True)
class ItemKind:
    """`count` things of `size` bytes each; keeping one saves `value` bytes per token; all are kept if `required`."""

    size: int
    value: int
    count: int
    required: bool = False


class Bin(NamedTuple):
    """Room for `capacity` bytes, in which a saved byte counts `weight` times."""

    capacity: int
    weight: int


class KnapsackChoice(NamedTuple):
    """Numbers of each kind in the first and the second bin; `exact` if no choice is worth more."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    worth: int
    exact: bool
    steps: int = 0


def choose(kinds: Sequence[ItemKind], first: Bin, second: Bin, *, least: int = 0) -> KnapsackChoice | None:
    """Return the choice that is worth most among those that keep `least` bytes; `None` when there is none.

    The first bin has the greater weight. Where a search would take too long, the best choice found is not `exact`, and
    none may be found where there is one.
    """
    if first.capacity < 0 or second.capacity < 0 or sum(kind.size * kind.count for kind in kinds) < least:
        return None
    search = _KnapsackSearch(kinds, first, second, least)
    search.descend(0, first.capacity, second.capacity, 0)
    if search.best is None:
        return None
    firsts, seconds, worth = search.best
    return KnapsackChoice(firsts, seconds, worth, exact=search.steps <= MAX_STEPS, steps=search.steps)


def upper_bound(kinds: Sequence[ItemKind], first: Bin, second: Bin) -> int:
    """Return what no choice is worth more than: the densest bytes in the better bin, the next in the other."""
    search = _KnapsackSearch(kinds, first, second, 0)
    return search.bound(0, max(first.capacity, 0), max(second.capacity, 0), 0)


class _KnapsackSearch:
    """Depth first over the kinds, the densest first, bounded by what a choice of fractions would be worth.

    Among kinds of one density the smallest comes last: it fills the gaps that the larger ones leave, so good choices
    are found first and rule out most of the others. Of the last kind as many as fit are best.
    """

    def __init__(self, kinds: Sequence[ItemKind], first: Bin, second: Bin, least: int) -> None:
        order = sorted(range(len(kinds)), key=lambda k: (-_density(kinds[k]), -kinds[k].size, k))
        self.kinds = [(index, kinds[index].size, kinds[index].value, kinds[index].count) for index in order]
        self.required = [kinds[index].required for index in order]
        self.first, self.second, self.least = first, second, least
        self.rest = [0] * (len(order) + 1)
        for depth in reversed(range(len(order))):
            self.rest[depth] = self.rest[depth + 1] + self.kinds[depth][1] * self.kinds[depth][3]
        self.firsts, self.seconds = [0] * len(order), [0] * len(order)
        self.steps = 0
        self.best: tuple[tuple[int, ...], tuple[int, ...], int] | None = None

    def descend(self, depth: int, room: int, spare: int, worth: int) -> None:
        if depth == len(self.kinds):
            self._keep(room, spare, worth)
            return
        index, size, value, count = self.kinds[depth]
        is_last = depth + 1 == len(self.kinds)
        most = min(count, room // size) if size else count
        for taken in range(most, -1, -1):
            left, gain = room - taken * size, worth + taken * value * self.first.weight
            if self._hopeless(depth, left, spare, gain):
                break  # with fewer of the densest kind, less still
            put_most = min(count - taken, spare // size) if size else count - taken
            put_least = count - taken if self.required[depth] else 0
            for put in range(put_most, put_least - 1, -1):
                self.steps += 1
                self.firsts[index], self.seconds[index] = taken, put
                below, total = spare - put * size, gain + put * value * self.second.weight
                if self._hopeless(depth + 1, left, below, total):
                    break
                self.descend(depth + 1, left, below, total)
                if is_last or self.rest[depth] - taken * size <= spare:
                    break  # nothing else wants this room
            if is_last and not self.required[depth]:
                break
        self.firsts[index] = self.seconds[index] = 0

    def _hopeless(self, depth: int, room: int, spare: int, worth: int) -> bool:
        if self.first.capacity - room + self.second.capacity - spare + self.rest[depth] < self.least:
            return True
        if self.best is None:
            return self.steps > 2 * MAX_STEPS
        return self.steps > MAX_STEPS or self.bound(depth, room, spare, worth) <= self.best[2]

    def _keep(self, room: int, spare: int, worth: int) -> None:
        kept = self.first.capacity - room + self.second.capacity - spare
        if kept >= self.least and (self.best is None or worth > self.best[2]):
            self.best = tuple(self.firsts), tuple(self.seconds), worth

    def bound(self, depth: int, room: int, spare: int, worth: int) -> int:
        for _, size, value, count in self.kinds[depth:]:
            size_of_all = size * count
            if not size_of_all:
                worth += value * count * self.first.weight
                continue
            taken = min(size_of_all, room)
            put = min(size_of_all - taken, spare)
            worth += -(-(taken * self.first.weight + put * self.second.weight) * value // size)
            room -= taken
            spare -= put
            if not room and not spare:
                break
        return worth


def _density(kind: ItemKind) -> float:
    return kind.value / kind.size if kind.size else float("inf")
