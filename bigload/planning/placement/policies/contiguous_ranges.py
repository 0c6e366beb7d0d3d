"""Place units so that every accelerator runs one stretch of the model: the fewest device changes there can be.

Streamed units run on the execution device, so they are part of its stretch, the first. Where that stretch ends decides
nearly everything: what follows has to fit on the other accelerators whole, and within the stretch only sizes matter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from operator import neg
from typing import NamedTuple

from bigload.devices import CPU, DISK, Device
from bigload.planning.placement.policies.memory_tiers import (
    Host,
    Tier,
    TierSplit,
    TierSplitter,
    members_of_forms,
)
from bigload.planning.placement.policies.sequential import roomier
from bigload.planning.placement.problem import PlacementProblem

Rooms = Sequence[tuple[Device, int]]
"""Accelerators, in the order in which they run, with the bytes that units may take on each."""


MAX_STEPS = 2_000_000
"""Units looked at before the best placement so far is taken. Real models on a few accelerators stay far below."""


class RankedPlacement(NamedTuple):
    """A placement with what it costs: `cost` per token in the unit of `memory_tiers.Host`, then device changes."""

    devices: tuple[Device, ...]
    execution_device: Device
    cost: int
    num_device_changes: int
    exact: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        return self.cost, self.num_device_changes


class RangeSearch:
    """The units of a problem, prepared for asking where a stretch that fits a device ends.

    A stretch may end before any unit but one that is_routed on the unit before it. Positions are those of such ends.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        units = problem.units
        self.problem, self.units = problem, units
        self.host = Host.of(problem)
        self.ends = [index for index in range(len(units) + 1) if index == len(units) or not units[index].is_routed]
        run = [0, *accumulate(unit.num_bytes + unit.run_bytes for unit in units)]
        self.sizes = [run[end] for end in self.ends]
        beside = [0, *accumulate(unit.run_bytes for unit in units)]
        self.beside = [beside[end] for end in self.ends]
        self.last = len(self.ends) - 1
        self.least_stream = min((unit.stream_bytes for unit in units), default=0)
        self._members = members_of_forms(units)
        self._splitters: dict[int, TierSplitter] = {}
        self.steps = 0

    @property
    def gave_up(self) -> bool:
        """Whether the steps are used up: from then on only what is found at once is found."""
        return self.steps > MAX_STEPS

    def best(self, rooms: Rooms, *, at_most: tuple[int, int] | None = None) -> RankedPlacement | None:
        """Return the placement of least cost, then fewest device changes; `None` without one.

        With `at_most` only placements of no higher rank are looked for.
        """
        if not rooms:
            return self._on_host(at_most)
        starts = self.starts(rooms)
        whole = self._resident(rooms, starts)
        if whole is not None:
            return whole if at_most is None or whole.rank <= at_most else None
        best: RankedPlacement | None = None
        for index in roomier(rooms):
            limit = at_most if best is None else best.rank
            found = self._streaming(rooms, index, starts, limit)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
            if self.gave_up:
                return None if best is None else best._replace(exact=False)
        return best

    def splitter(self, position: int) -> TierSplitter:
        """Return what splits the units before a position among tiers."""
        if position not in self._splitters:
            self._splitters[position] = made = TierSplitter(self._members, self.host, self.ends[position])
            self.steps += made.steps
        return self._splitters[position]

    def _on_host(self, at_most: tuple[int, int] | None) -> RankedPlacement | None:
        split = self.splitter(self.last).best(None)
        if split is None or (at_most is not None and split.cost > at_most[0]):
            return None
        return RankedPlacement(self._devices(split, CPU), CPU, split.cost, 0, split.exact)

    def _resident(self, rooms: Rooms, starts: list[list[int]]) -> RankedPlacement | None:
        """Place everything on the fewest accelerators that hold it."""
        number = next((number for number, row in enumerate(starts) if row[0] == 0), None)
        if number is None:
            return None
        devices = self.filled(0, rooms, starts, number, first=0)
        return RankedPlacement(devices, devices[0] if devices else rooms[0][0], 0, max(number - 1, 0))

    def starts(self, rooms: Rooms) -> list[list[int]]:
        """Return `starts[m][g]`: the first position from which `m` of `rooms[g:]` hold everything to the end.

        Rows end where one more accelerator holds no more, or where everything is held.
        """
        sizes = self.sizes
        rows = [[self.last] * (len(rooms) + 1)]
        for number in range(1, len(rooms) + 1):
            fewer = rows[-1]
            row = list(fewer)  # where fewer than `number` are left, that is all of them
            first = row[len(rooms) - number + 1]
            for index in reversed(range(len(rooms) - number + 1)):
                end, room = fewer[index + 1], rooms[index][1]
                start = end if room < 0 else bisect_left(sizes, sizes[end] - room, 0, end + 1)
                row[index] = first = min(first, start)
            self.steps += len(row) - number
            if row == fewer:
                break
            rows.append(row)
            if row[0] == 0:
                break
        return rows

    def filled(
        self, position: int, rooms: Rooms, starts: list[list[int]], number: int, *, first: int
    ) -> tuple[Device, ...]:
        """Return devices for the units from `position`: `number` of `rooms[first:]`, in order, each filled up."""
        devices: list[Device] = []
        for index in range(first, len(rooms)):
            if number == 0:
                break
            device, room = rooms[index]
            end = self._end(position, room)
            if end > position and end >= starts[number - 1][index + 1]:
                devices += [device] * (self.ends[end] - self.ends[position])
                position, number = end, number - 1
        return tuple(devices)

    def _end(self, start: int, room: int) -> int:
        return start if room < 0 else bisect_right(self.sizes, self.sizes[start] + room, start) - 1

    def _streaming(
        self, rooms: Rooms, index: int, starts: list[list[int]], at_most: tuple[int, int] | None
    ) -> RankedPlacement | None:
        """Place the first units on or off the accelerator number `index`, and what follows on those after it."""
        device, room = rooms[index]
        following = [row[index + 1] for row in starts[: len(rooms) - index]]
        best: RankedPlacement | None = None
        for position in range(following[-1], self.last + 1):
            if self.gave_up:
                break
            limit = at_most if best is None else best.rank
            left = room - self.beside[position]
            if left < 0:
                break  # with a longer stretch, more is streamed
            splitter = self.splitter(position)
            before = splitter.steps
            least = splitter.least_cost(left, self.least_stream) if limit is not None else 0
            if limit is not None and least > limit[0]:
                self.steps += 1 + splitter.steps - before
                break
            number = bisect_left(following, -position, key=neg)
            split = None
            if limit is None or (least, number) <= limit:
                split = splitter.best(left, below=None if limit is None else limit[0] + 1)
            self.steps += 1 + splitter.steps - before
            if split is None or (number and not split.uses_accelerator):
                continue  # streamed units run on the accelerator that comes first in the device map
            if limit is None or (split.cost, number) < limit or (best is None and (split.cost, number) == limit):
                rest = self.filled(position, rooms, starts, number, first=index + 1)
                best = RankedPlacement((*self._devices(split, device), *rest), device, split.cost, number, split.exact)
        return best

    @staticmethod
    def _devices(split: TierSplit, device: Device) -> tuple[Device, ...]:
        homes = {Tier.ACCELERATOR: device, Tier.RAM: CPU, Tier.DISK: DISK}
        return tuple(homes[tier] for tier in split.tiers)
