"""Divide units among three tiers: an accelerator that runs them, RAM, and the disk, so that a token costs least.

This is the heart of the exact policy: all units given here run on one device, in whatever order, and only how many of
each size go to which tier matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from bigload.devices import CPU, DISK
from bigload.planning.model.units import Unit
from bigload.planning.placement.policies.knapsack import Bin, Choice, Kind, choose, upper_bound
from bigload.planning.placement.problem import PlacementProblem

KNAPSACK_STEP = 10
"""How many units looked at one step of the knapsack counts for."""


class Tier(IntEnum):
    """Where weights are, the fastest first."""

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

    def cost(self, units: Sequence[Unit], tiers: Sequence[Tier]) -> int:
        """Return what a token costs when `units` are where `tiers` says."""
        each = {Tier.ACCELERATOR: 0, Tier.RAM: self.ram_cost, Tier.DISK: self.disk_cost}
        return sum(unit.token_bytes * each[tier] for unit, tier in zip(units, tiers, strict=True))


@dataclass(frozen=True, slots=True)
class Division:
    """A tier for each unit, what a token then costs, and whether no division costs less."""

    tiers: tuple[Tier, ...]
    cost: int
    exact: bool


class Divider:
    """Divides one list of units; made once, asked for several sizes of the accelerator.

    `steps` is what the last division took: units looked at.
    """

    def __init__(self, units: Sequence[Unit], host: Host) -> None:
        self.units, self.host = units, host
        self.members: dict[tuple[int, int, int], list[int]] = {}
        for index, unit in enumerate(units):
            self.members.setdefault((unit.num_bytes, unit.token_bytes, unit.stream_bytes), []).append(index)
        self.total_cost = sum(unit.token_bytes for unit in units) * host.disk_cost
        self.num_bytes = sum(unit.num_bytes for unit in units)
        self.streams = sorted({stream for _, _, stream in self.members})
        self.steps = 0

    def least_cost(self, room: int, least_stream: int) -> int:
        """Return a cost that no division is below, with `room` bytes on the accelerator.

        `least_stream` is what at least is at once on the accelerator of a unit that is streamed.
        """
        kinds = [Kind(size, value, len(members)) for (size, value, _), members in self.members.items()]
        reserved = self.host.num_in_flight * least_stream if self.num_bytes > room else 0
        return self.total_cost - upper_bound(kinds, *self._bins(room - reserved, self.host.ram_room))

    def divide(self, room: int | None, *, below: int | None = None) -> Division | None:
        """Return the cheapest division with `room` bytes on the accelerator, workspace included.

        `room` is `None` when no unit may be on it: their workspace is someone else's concern then. `None` is returned
        when there is no division, or none that costs less than `below`.
        """
        best: Division | None = None
        exact = True
        self.steps = len(self.units)
        for streamed, from_disk in self._workspaces(room):
            if best is not None:
                below = best.cost
            found = self._with_workspace(room, streamed, from_disk, below)
            if found is not None and (below is None or found.cost < below):
                best = found
            exact = exact and (found is None or found.exact)
        if best is None:
            return None
        tiers = best.tiers if room is not None else tuple(map(self._off_accelerator, best.tiers))
        return Division(tiers, best.cost, exact)

    def _off_accelerator(self, tier: Tier) -> Tier:
        """Things of no bytes fit even where there is no room."""
        return tier if tier != Tier.ACCELERATOR else Tier.RAM if self.host.has_ram else Tier.DISK

    def _workspaces(self, room: int | None) -> Iterator[tuple[int, int]]:
        """Yield the sizes that the largest streamed unit, and the largest one from disk, can have."""
        for streamed in [0, *self.streams] if room is not None else self.streams[-1:] or [0]:
            for from_disk in [0, *(size for size in self.streams if 0 < size <= streamed and self.host.disk_room != 0)]:
                yield streamed, from_disk

    def _with_workspace(self, room: int | None, streamed: int, from_disk: int, below: int | None) -> Division | None:
        host, count = self.host, self.host.num_in_flight
        self.steps += KNAPSACK_STEP * len(self.members)
        left = 0 if room is None else room - count * streamed
        spare = host.ram_room - (count * from_disk if host.has_ram else 0)
        kinds: list[Kind] = []
        kept: list[tuple[list[int], int | None]] = []
        for (size, value, stream), members in self.members.items():
            if stream > streamed:  # the workspace would be too small for it
                left -= size * len(members)
                kept.append((members, len(members)))
            else:
                kinds.append(Kind(size, value, len(members), required=stream > from_disk))
                kept.append((members, None))
        if left < 0 or spare < 0:
            return None
        forced = sum(value * len(members) for (_, value, stream), members in self.members.items() if stream > streamed)
        saved = forced * host.disk_cost
        bins = self._bins(left, spare)
        if below is not None and self.total_cost - saved - upper_bound(kinds, *bins) >= below:
            return None
        flexible = sum(kind.size * kind.count for kind in kinds)
        least = 0 if host.disk_room is None else flexible - host.disk_room
        choice = choose(kinds, *bins, least=least)
        self.steps += len(self.units) + KNAPSACK_STEP * (len(kinds) if choice is None else choice.steps)
        return None if choice is None else self._division(choice, kept)

    def _bins(self, room: int, ram_room: int) -> tuple[Bin, Bin]:
        host = self.host
        return Bin(max(room, 0), host.disk_cost), Bin(max(ram_room, 0), host.disk_cost - host.ram_cost)

    def _division(self, choice: Choice, kept: list[tuple[list[int], int | None]]) -> Division:
        """Give the first units of each kind to the accelerator, the next to RAM."""
        tiers = [Tier.DISK] * len(self.units)
        counts = iter(zip(choice.first, choice.second, strict=True))
        for members, forced in kept:
            first, second = next(counts) if forced is None else (forced, 0)
            for index in members[:first]:
                tiers[index] = Tier.ACCELERATOR
            for index in members[first : first + second]:
                tiers[index] = Tier.RAM
        return Division(tuple(tiers), self.host.cost(self.units, tiers), choice.exact)
