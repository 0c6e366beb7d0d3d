"""Spread the weights over the accelerators, so that each has room left for caches and activations.

The words are accelerate's: `balanced` keeps the fullest accelerator as empty as possible, `balanced_low_0` first
empties the first one, for programs that need it for something else. Where not everything fits on accelerators these are
full anyway, and both do as `sequential` does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from bigload.planning.placement.policies.sequential import Capacities, fill, place_sequentially
from bigload.planning.placement.problem import Misfit, Placement, PlacementProblem


def place_balanced(problem: PlacementProblem) -> Placement | Misfit:
    """Place units so that the fullest accelerator holds the fewest bytes possible.

    Example: blocks of 3, 3, 2 and 2 bytes on two devices of 10: 3 + 3 and 2 + 2, where `sequential` would put all on
    the first.
    """
    return _spread(problem, _evened)


def place_balanced_low_0(problem: PlacementProblem) -> Placement | Misfit:
    """Place units so that the first accelerator holds the fewest bytes possible, and the others are balanced.

    Example: blocks of 3, 3, 2 and 2 bytes on devices of 10, 4 and 4: the second and the third cannot hold all four, so
    the first takes one; 3, 3 and 2 + 2.
    """

    def lowered(sizes: Sequence[int], capacities: Capacities) -> Capacities:
        (first, limit), *others = capacities
        least = bisect_left(range(limit or 0), x=True, key=lambda size: _all_fit(sizes, [(first, size), *others]))
        return [(first, least), *_evened(sizes, others, before=[(first, least)])]

    return _spread(problem, lowered)


def _spread(problem: PlacementProblem, lower: Callable[[Sequence[int], Capacities], Capacities]) -> Placement | Misfit:
    """Place units sequentially, with capacities that `lower` reduces without pushing anything off."""
    found = place_sequentially(problem)
    sizes = [unit.num_bytes + unit.run_bytes for unit in problem.units]
    capacities = problem.accelerators
    if isinstance(found, Misfit) or not sizes or not _all_fit(sizes, capacities):
        return found
    devices = tuple(fill(sizes, lower(sizes, capacities)))
    return replace(found, devices=devices, execution_device=devices[0])


def _evened(sizes: Sequence[int], capacities: Capacities, before: Capacities = ()) -> Capacities:
    """Return `capacities` cut to the least common level that still holds what `before` does not."""

    def cut(level: int) -> Capacities:
        return [(device, min(limit or 0, level)) for device, limit in capacities]

    highest = max((limit or 0 for _, limit in capacities), default=0)
    return cut(bisect_left(range(highest), x=True, key=lambda level: _all_fit(sizes, [*before, *cut(level)])))


def _all_fit(sizes: Sequence[int], capacities: Capacities) -> bool:
    return len(fill(sizes, capacities)) == len(sizes)
