"""Exact policy: of all placements that keep every limit, the one that is best by these criteria, in this order.

1. the least estimated time per token: bytes from disk by its bandwidth, bytes from RAM by that of the link, of routed
   experts only those that a token chooses;
2. the fewest changes of device in a forward pass;
3. the emptiest fullest accelerator, or the first ones full (`Balance`);
4. earlier units on earlier devices, so that the answer is always the same.

Candidates are all placements that fill the accelerators in their order, each with units in theirs; any unit may be off
them. Contiguous ranges (`contiguous_ranges.py`) answer most questions at once, and a bound tells when they do. Where
they may not, all other placements are searched (`interleaved_streaming.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice

from bigload.devices import CPU, DISK, Device
from bigload.planning.choices import Balance
from bigload.planning.model.units import joined
from bigload.planning.placement.policies.bounds import least_accelerators, lower_bound
from bigload.planning.placement.policies.contiguous_ranges import RangeSearch, RankedPlacement, Rooms
from bigload.planning.placement.policies.interleaved_streaming import InterleavedSearch
from bigload.planning.placement.policies.memory_tiers import Host
from bigload.planning.placement.policies.sequential import place_sequentially
from bigload.planning.placement.problem import Misfit, Placement, PlacementProblem, device_loads, fullest_share

MAX_ORDERS = 1_000
"""Orders of unlike accelerators that are tried; eight cards of three types have 560."""

_NEAR = Fraction(1, 1_000)


def place_optimally(problem: PlacementProblem) -> Placement | Misfit:
    """Place `units` as well as can be.

    Example: blocks of 2, 2, 2 and 3 bytes, cuda:0=7 and cpu=20. `sequential` sees that the block of 3 finds no room
    and needs 3 bytes of workspace, which leaves room for two blocks of 2. Here the block of 3 stays with one of 2, and
    the workspace is 2: 4 bytes are streamed instead of 5.
    """
    return _PlacementSearch(problem).answer()


class _PlacementSearch:
    """One problem, with what the questions about it share."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.orders = list(orders_of(problem))
        self.has_all_orders = len(self.orders) < MAX_ORDERS
        self.ranges = RangeSearch(problem)
        self.interleaved = InterleavedSearch(self.ranges)

    def answer(self) -> Placement | Misfit:
        found = self._best_ranges(self.orders)
        self.has_all_orders = self.has_all_orders and not self.ranges.gave_up
        if found is None:
            found = _sequential(self.problem)
        proven = found is not None and self._is_best_by_ranges(found)
        if not proven and self._may_stream_anywhere:
            for rooms in self.orders:
                found = self.interleaved.best(rooms, None if found is None else found.rank) or found
            proven = not self.interleaved.gave_up and self.has_all_orders
            if not proven:
                found = min(filter(None, (found, _sequential(self.problem))), key=lambda one: one.rank, default=None)
        if found is None:
            misfit = place_sequentially(replace(self.problem, units=joined(self.problem.units)))
            assert isinstance(misfit, Misfit), "filling the devices in order was tried"
            return misfit
        if self.problem.balance is Balance.SPREAD and self.problem.accelerators:
            found = self._spread(found)
        return _placement(self.problem, found._replace(exact=proven))

    @property
    def _may_stream_anywhere(self) -> bool:
        """Whether streamed units can be outside of the first stretch; experts cannot leave their block."""
        return len(self.problem.accelerators) > 1 and not any(unit.is_routed for unit in self.problem.units)

    def _best_ranges(self, orders: Sequence[Rooms], at_most: tuple[int, int] | None = None) -> RankedPlacement | None:
        best: RankedPlacement | None = None
        for rooms in orders:
            found = self.ranges.best(rooms, at_most=at_most if best is None else best.rank)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
            if self.ranges.gave_up:
                break
        return best

    def _is_best_by_ranges(self, found: RankedPlacement) -> bool:
        """Return whether it is known without a search that no placement with the units in order ranks below `found`."""
        if len(self.problem.accelerators) < 2:
            return found.exact  # there is but one stretch
        if found.cost == 0 and self.has_all_orders and all(unit.token_bytes for unit in self.problem.units):
            return True  # nothing is streamed, and stretches are the only way to hold all
        bound = lower_bound(self.problem)
        return found.rank <= (bound.cost, least_accelerators(self.problem, found.cost) - 1)

    def _spread(self, found: RankedPlacement) -> RankedPlacement:
        """Return a placement of the same rank whose fullest accelerator is as empty as possible."""
        problem = self.problem
        self.ranges.steps = 0  # a search of its own
        limits = dict(problem.budget.limits)
        # Who changes device no more often than the accelerators in use require runs one stretch on each of them.
        fewest = least_accelerators(problem, found.cost) - 1
        is_elsewhere = found.cost > 0 and self._may_stream_anywhere and found.num_device_changes > fewest

        def below(level: Fraction, *, strictly: bool) -> RankedPlacement | None:
            orders = [
                [
                    (
                        device,
                        min(
                            room,
                            _most(limits[device] or 0, level, strictly=strictly) - problem.fixed_bytes.get(device, 0),
                        ),
                    )
                    for device, room in rooms
                ]
                for rooms in self.orders
            ]
            better = self._best_ranges(orders, at_most=found.rank)
            if better is None and is_elsewhere:
                limit = (found.cost, found.num_device_changes + 1)
                better = next(filter(None, (self.interleaved.best(rooms, limit) for rooms in orders)), None)
            return better

        lowest, highest = Fraction(0), _peak(problem, found)
        better = below(highest, strictly=True)
        while better is not None and highest:  # what holds nothing cannot be emptier
            found, highest = better, _peak(problem, better)
            while highest - lowest > _NEAR:
                middle = (lowest + highest) / 2
                better = below(middle, strictly=False)
                if better is None:
                    lowest = middle
                else:
                    found, highest = better, _peak(problem, better)
            better = below(highest, strictly=True)
        return found


def orders_of(problem: PlacementProblem) -> Iterator[Rooms]:
    """Yield the orders in which accelerators may be used, the given one first; like ones are not exchanged."""
    rooms = problem.accelerators
    if not problem.any_order:
        yield rooms
        return
    alike: dict[int, list[tuple[Device, int]]] = {}
    for device, room in rooms:
        alike.setdefault(room, []).append((device, room))
    for arrangement in islice(_arrangements([room for _, room in rooms]), MAX_ORDERS):
        members = {room: iter(devices) for room, devices in alike.items()}
        yield [next(members[room]) for room in arrangement]


def _arrangements(preferred: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not preferred:
        yield ()
        return
    for room in dict.fromkeys(preferred):
        rest = list(preferred)
        rest.remove(room)
        yield from ((room, *others) for others in _arrangements(rest))


def _sequential(problem: PlacementProblem) -> RankedPlacement | None:
    """Return what filling the devices in order gives, experts with their blocks."""
    placement = place_sequentially(replace(problem, units=joined(problem.units)))
    if isinstance(placement, Misfit):
        return None
    homes = iter(placement.devices)
    devices: list[Device] = []
    for unit in problem.units:
        devices.append(devices[-1] if unit.is_routed else next(homes))
    placement = replace(placement, devices=tuple(devices))
    cost = token_cost(problem, placement)
    return RankedPlacement(
        placement.devices, placement.execution_device, cost, placement.num_device_changes, exact=False
    )


def token_cost(problem: PlacementProblem, placement: Placement) -> int:
    """Return what a token costs, in units of 1 / (disk bandwidth x link bandwidth) seconds."""
    host = Host.of(problem)
    each = {CPU: host.ram_cost, DISK: host.disk_cost}
    homes = zip(problem.units, placement.devices, strict=True)
    return sum(unit.token_bytes * each.get(device, 0) for unit, device in homes)


def token_seconds(problem: PlacementProblem, placement: Placement) -> float:
    """Return the seconds in which the bytes that one token needs arrive."""
    return token_cost(problem, placement) / (problem.bandwidth.disk * problem.bandwidth.link)


def _most(limit: int, level: Fraction, *, strictly: bool) -> int:
    """Return the bytes that are a share of a limit of at most `level`, or less."""
    # In whole numbers, because every device of every order is asked: fractions are slow.
    return (level.numerator * limit - strictly) // level.denominator


def _peak(problem: PlacementProblem, found: RankedPlacement) -> Fraction:
    return fullest_share(problem, device_loads(problem, _placement(problem, found)))


def _placement(problem: PlacementProblem, found: RankedPlacement) -> Placement:
    return Placement(
        devices=found.devices,
        execution_device=found.execution_device,
        num_in_flight=problem.num_in_flight,
        is_proven=found.exact,
    )
