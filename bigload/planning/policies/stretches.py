"""Place units so that every accelerator runs one stretch of the model: the fewest device changes there can be.

Streamed units run on the execution device, so they are part of its stretch, the first. Where that stretch ends decides
nearly everything: what follows has to fit on the other accelerators whole, and within the stretch only sizes matter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from bigload.devices import CPU, DISK, Device
from bigload.planning.placement import PlacementProblem
from bigload.planning.policies.tiers import Divider, Division, Host, Tier

Rooms = Sequence[tuple[Device, int]]
"""Accelerators, in the order in which they run, with the bytes that units may take on each."""


@dataclass(frozen=True, slots=True)
class Found:
    """A placement with what it costs: `cost` per token in the unit of `tiers.Host`, then device changes."""

    devices: tuple[Device, ...]
    execution_device: Device
    cost: int
    num_device_changes: int
    exact: bool = True

    @property
    def rank(self) -> tuple[int, int]:
        return self.cost, self.num_device_changes


class Stretches:
    """The units of a problem, prepared for asking where a stretch that fits a device ends.

    A stretch may end before any unit but one that rides on the unit before it. Positions are those of such ends.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        units = problem.units
        self.problem, self.units = problem, units
        self.host = Host.of(problem)
        self.ends = [index for index in range(len(units) + 1) if index == len(units) or not units[index].rides]
        run = [0, *accumulate(unit.num_bytes + unit.run_bytes for unit in units)]
        self.sizes = [run[end] for end in self.ends]
        beside = [0, *accumulate(unit.run_bytes for unit in units)]
        self.beside = [beside[end] for end in self.ends]
        self.last = len(self.ends) - 1
        self.least_stream = min((unit.stream_bytes for unit in units), default=0)
        self._dividers: dict[int, Divider] = {}

    def best(self, rooms: Rooms, *, at_most: tuple[int, int] | None = None) -> Found | None:
        """Return the placement of least cost, then fewest device changes; `None` without one.

        With `at_most` only placements of no higher rank are looked for.
        """
        if not rooms:
            return self._on_host(at_most)
        whole = self._resident(rooms)
        if whole is not None:
            return whole if at_most is None or whole.rank <= at_most else None
        best: Found | None = None
        for index in range(len(rooms)):
            limit = at_most if best is None else best.rank
            found = self._streaming(rooms[index], rooms[index + 1 :], limit)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
        return best

    def divider(self, position: int) -> Divider:
        """Return the divider of the units before a position."""
        if position not in self._dividers:
            self._dividers[position] = Divider(self.units[: self.ends[position]], self.host)
        return self._dividers[position]

    def _on_host(self, at_most: tuple[int, int] | None) -> Found | None:
        division = self.divider(self.last).divide(None)
        if division is None or (at_most is not None and division.cost > at_most[0]):
            return None
        return Found(self._devices(division, CPU), CPU, division.cost, 0, division.exact)

    def _resident(self, rooms: Rooms) -> Found | None:
        """Place everything on the fewest accelerators that hold it."""
        starts = self.starts(rooms)
        number = next((number for number, row in enumerate(starts) if row[0] == 0), None)
        if number is None:
            return None
        devices = self.filled(0, rooms, starts, number)
        return Found(devices, devices[0] if devices else rooms[0][0], 0, max(number - 1, 0))

    def starts(self, rooms: Rooms) -> list[list[int]]:
        """Return `starts[m][g]`: the first position from which `m` of `rooms[g:]` hold everything to the end."""
        beyond = self.last
        rows = [[beyond] * (len(rooms) + 1)]
        for _ in rooms:
            row = [beyond] * (len(rooms) + 1)
            for index in reversed(range(len(rooms))):
                row[index] = min(row[index + 1], self._start(rows[-1][index + 1], rooms[index][1]))
            rows.append(row)
        return rows

    def filled(self, position: int, rooms: Rooms, starts: list[list[int]], number: int) -> tuple[Device, ...]:
        """Return devices for the units from `position`: `number` of `rooms`, each as full as it goes, in order."""
        devices: list[Device] = []
        for index, (device, room) in enumerate(rooms):
            if number == 0:
                break
            end = self._end(position, room)
            if end > position and end >= starts[number - 1][index + 1]:
                devices += [device] * (self.ends[end] - self.ends[position])
                position, number = end, number - 1
        return tuple(devices)

    def _start(self, end: int, room: int) -> int:
        return end if room < 0 else bisect_left(self.sizes, self.sizes[end] - room, 0, end + 1)

    def _end(self, start: int, room: int) -> int:
        return start if room < 0 else bisect_right(self.sizes, self.sizes[start] + room, start) - 1

    def _streaming(self, execution: tuple[Device, int], others: Rooms, at_most: tuple[int, int] | None) -> Found | None:
        """Place the first units on or off the execution device, and what follows on the other accelerators."""
        device, room = execution
        starts = self.starts(others)
        best: Found | None = None
        for position in range(starts[-1][0], self.last + 1):
            limit = at_most if best is None else best.rank
            left = room - self.beside[position]
            divider = self.divider(position)
            if left < 0 or (limit is not None and divider.least_cost(left, self.least_stream) > limit[0]):
                break  # with a longer stretch, more is streamed
            number = next(number for number, row in enumerate(starts) if row[0] <= position)
            if limit is not None and (divider.least_cost(left, self.least_stream), number) > limit:
                continue
            division = divider.divide(left, below=None if limit is None else limit[0] + 1)
            if division is None or (number and Tier.ACCELERATOR not in division.tiers):
                continue  # streamed units run on the accelerator that comes first in the device map
            if limit is None or (division.cost, number) < limit or (best is None and (division.cost, number) == limit):
                rest = self.filled(position, others, starts, number)
                best = Found((*self._devices(division, device), *rest), device, division.cost, number, division.exact)
        return best

    @staticmethod
    def _devices(division: Division, device: Device) -> tuple[Device, ...]:
        homes = {Tier.ACCELERATOR: device, Tier.RAM: CPU, Tier.DISK: DISK}
        return tuple(homes[tier] for tier in division.tiers)
