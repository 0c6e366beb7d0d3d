"""Split of units among three tiers, an accelerator that runs them, RAM and disk, so that a token costs least.

This is the core of the exact policy: all units given here run on one device, in any order, so only the number of units
of each size in each tier matters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from bigload.devices import CPU, DISK
from bigload.planning.model.units import Unit
from bigload.planning.placement.policies.knapsack import Bin, ItemKind, choose, upper_bound
from bigload.planning.placement.problem import PlacementProblem

KNAPSACK_STEP = 10
"""Steps that one step of the knapsack search counts for."""


class Tier(IntEnum):
    """Memory that weights are in, the fastest first."""

    ACCELERATOR = 0
    RAM = 1
    DISK = 2


@dataclass(frozen=True, slots=True)
class Host:
    """Room for weights in RAM and on disk, and what a byte that is not on an accelerator costs.

    Costs are in units of 1 / (disk bandwidth x link bandwidth) seconds, so that they are whole numbers.
    `disk_room` is `None` when it is unbounded; without RAM, nothing passes through it.
    """

    ram_room: int
    has_ram: bool
    disk_room: int | None
    num_in_flight: int
    ram_cost: int
    disk_cost: int

    @classmethod
    def of(cls, problem: PlacementProblem) -> Host:
        """Return the host of a problem; without accelerators it runs the model, which takes some of its room."""
        budget, bandwidth = problem.budget, problem.bandwidth
        runs = not budget.accelerators
        room = (problem.room(CPU) if runs else budget.get(CPU)) or 0
        return cls(
            ram_room=room - (sum(unit.run_bytes for unit in problem.units) if runs else 0),
            has_ram=budget.has_cpu,
            disk_room=budget.get(DISK) if budget.has_disk else 0,
            num_in_flight=problem.num_in_flight,
            ram_cost=0 if runs else bandwidth.disk,
            disk_cost=bandwidth.link,
        )


class TierSplit(NamedTuple):
    """Numbers of units of each kind on the accelerator and in RAM, the others on disk.

    `counts` has a pair for each of `members`, the indexes of the units of one kind. `cost` is that of a token; no split
    costs less if `exact`.
    """

    members: Sequence[Sequence[int]]
    counts: Sequence[tuple[int, int]]
    cost: int
    exact: bool

    @property
    def uses_accelerator(self) -> bool:
        return any(first for first, _ in self.counts)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tier of each unit: of each kind the first units are on the accelerator, the next in RAM."""
        tiers = [Tier.DISK] * sum(map(len, self.members))
        for members, (first, second) in zip(self.members, self.counts, strict=True):
            for index in members[:first]:
                tiers[index] = Tier.ACCELERATOR
            for index in members[first : first + second]:
                tiers[index] = Tier.RAM
        return tuple(tiers)


UnitForm = tuple[int, int, int]
"""Bytes, bytes per token and bytes while streamed: units of one form are exchangeable."""


def members_of_forms(units: Sequence[Unit]) -> dict[UnitForm, list[int]]:
    """Return the indexes of the units of each form, in order."""
    members: dict[UnitForm, list[int]] = {}
    for index, unit in enumerate(units):
        members.setdefault((unit.num_bytes, unit.token_bytes, unit.stream_bytes), []).append(index)
    return members


def sparsest(units: Iterable[Unit]) -> tuple[int, int]:
    """Return bytes per token, and bytes, of the unit of which a token needs the least share."""
    pairs = ((unit.token_bytes, unit.num_bytes) for unit in units if unit.num_bytes)
    return min(pairs, key=lambda pair: pair[0] / pair[1], default=(0, 1))


class TierSplitter:
    """Splits the units before index `end`; made once, asked for several sizes of the accelerator.

    `steps` is what all questions took; answers are remembered, because orders of accelerators repeat questions.
    """

    def __init__(self, members: Mapping[UnitForm, Sequence[int]], host: Host, end: int) -> None:
        self.host = host
        ends = {form: bisect_left(indexes, end) for form, indexes in members.items()}
        self.members = {form: members[form][:count] for form, count in ends.items() if count}
        self.kinds = [ItemKind(size, value, len(indexes)) for (size, value, _), indexes in self.members.items()]
        self.total_cost = sum(kind.value * kind.count for kind in self.kinds) * host.disk_cost
        self.num_bytes = sum(kind.size * kind.count for kind in self.kinds)
        self.streams = sorted({stream for _, _, stream in self.members})
        self.steps = KNAPSACK_STEP * len(self.kinds)
        self._lower_bounds: dict[tuple[int, int], int] = {}
        self._best: dict[int | None, TierSplit] = {}
        self._none_below: dict[int | None, int | None] = {}

    def least_cost(self, room: int, least_stream: int) -> int:
        """Return a cost that no split is below, with `room` bytes on the accelerator.

        `least_stream` is the least workspace that a streamed unit takes on the accelerator.
        """
        asked = room, least_stream
        if asked not in self._lower_bounds:
            self.steps += KNAPSACK_STEP * len(self.kinds)
            reserved = self.host.num_in_flight * least_stream if self.num_bytes > room else 0
            bins = self._bins(room - reserved, self.host.ram_room)
            self._lower_bounds[asked] = self.total_cost - upper_bound(self.kinds, *bins)
        return self._lower_bounds[asked]

    def best(self, room: int | None, *, below: int | None = None) -> TierSplit | None:
        """Return the cheapest split with `room` bytes on the accelerator, workspace included.

        `room` is `None` when no unit may be on it: their workspace is counted elsewhere then. `None` is returned when
        there is no split, or none that costs less than `below`.
        """
        if room in self._best:
            known = self._best[room]
            return known if below is None or known.cost < below else None
        if room in self._none_below:
            searched = self._none_below[room]
            if searched is None or (below is not None and below <= searched):
                return None
        best = self._search(room, below)
        if best is None:
            self._none_below[room] = below
        else:
            self._best[room] = best
        return best

    def _search(self, room: int | None, below: int | None) -> TierSplit | None:
        best: TierSplit | None = None
        exact = True
        for streamed, from_disk in self._workspaces(room):
            if best is not None:
                below = best.cost
            found = self._with_workspace(room, streamed, from_disk, below)
            if found is not None and (below is None or found.cost < below):
                best = found
            exact = exact and (found is None or found.exact)
        if best is None:
            return None
        counts = best.counts if room is not None else tuple(map(self._off_accelerator, best.counts))
        return TierSplit(best.members, counts, best.cost, exact)

    def _off_accelerator(self, counts: tuple[int, int]) -> tuple[int, int]:
        """Units of no bytes fit even where there is no room."""
        return (0, sum(counts) if self.host.has_ram else counts[1])

    def _workspaces(self, room: int | None) -> Iterator[tuple[int, int]]:
        """Yield the sizes that the largest streamed unit, and the largest one from disk, can have."""
        for streamed in [0, *self.streams] if room is not None else self.streams[-1:] or [0]:
            for from_disk in [0, *(size for size in self.streams if 0 < size <= streamed and self.host.disk_room != 0)]:
                yield streamed, from_disk

    def _with_workspace(self, room: int | None, streamed: int, from_disk: int, below: int | None) -> TierSplit | None:
        host, num_in_flight = self.host, self.host.num_in_flight
        self.steps += KNAPSACK_STEP * len(self.members)
        left = 0 if room is None else room - num_in_flight * streamed
        spare = host.ram_room - (num_in_flight * from_disk if host.has_ram else 0)
        kinds: list[ItemKind] = []
        saved = 0
        for kind, stream in zip(self.kinds, (stream for _, _, stream in self.members), strict=True):
            if stream > streamed:  # the workspace would be too small to stream it, so it stays on the accelerator
                left -= kind.size * kind.count
                saved += kind.value * kind.count * host.disk_cost
            else:
                kinds.append(ItemKind(kind.size, kind.value, kind.count, required=stream > from_disk))
        if left < 0 or spare < 0:
            return None
        bins = self._bins(left, spare)
        if below is not None and self.total_cost - saved - upper_bound(kinds, *bins) >= below:
            return None
        least = 0 if host.disk_room is None else sum(kind.size * kind.count for kind in kinds) - host.disk_room
        choice = choose(kinds, *bins, least=least)
        self.steps += KNAPSACK_STEP * (len(kinds) if choice is None else choice.steps)
        if choice is None:
            return None
        chosen = iter(zip(choice.first, choice.second, strict=True))
        counts = [
            (kind.count, 0) if stream > streamed else next(chosen)
            for kind, (_, _, stream) in zip(self.kinds, self.members, strict=True)
        ]
        return TierSplit(tuple(self.members.values()), counts, self._cost(counts), choice.exact)

    def _cost(self, counts: Sequence[tuple[int, int]]) -> int:
        """Return what a token costs with so many units of each kind on the accelerator and in RAM."""
        return sum(
            kind.value * (second * self.host.ram_cost + (kind.count - first - second) * self.host.disk_cost)
            for kind, (first, second) in zip(self.kinds, counts, strict=True)
        )

    def _bins(self, room: int, ram_room: int) -> tuple[Bin, Bin]:
        host = self.host
        return Bin(max(room, 0), host.disk_cost), Bin(max(ram_room, 0), host.disk_cost - host.ram_cost)
