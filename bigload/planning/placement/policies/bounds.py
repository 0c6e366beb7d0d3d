"""Lower bounds of any placement: the least that must be off the accelerators, and what that costs per token.

Even a placement that tears the order of the units apart keeps these bounds. Devices hold whole units, so the room that
counts is the largest sum of unit sizes below a device's limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from bigload.planning.placement.policies.knapsack import Bin, ItemKind, choose
from bigload.planning.placement.policies.memory_tiers import Host, sparsest
from bigload.planning.placement.problem import PlacementProblem

MAX_UNLIKE_ROOMS = 64
"""With accelerators of more sizes than this, gaps that whole units leave are not counted."""


class LowerBound(NamedTuple):
    """Least bytes off the accelerators and on disk, and least cost (unit: `memory_tiers.Host`), of any placement."""

    offloaded_bytes: int
    disk_bytes: int
    cost: int


def lower_bound(problem: PlacementProblem) -> LowerBound:
    """Return the bound of a problem; without accelerators everything runs in RAM, and only the disk costs."""
    host = Host.of(problem)
    weights = sum(unit.num_bytes for unit in problem.units)
    offloaded = weights
    if problem.budget.accelerators:
        offloaded -= _largest_sum((unit.num_bytes for unit in problem.units), weights - _missing(problem))
    disk = max(offloaded - _ram(problem, host, offloaded), 0)
    cost = _least_tokens(problem, offloaded) * host.ram_cost
    cost += _least_tokens(problem, disk) * (host.disk_cost - host.ram_cost)
    return LowerBound(offloaded if problem.budget.accelerators else disk, disk, cost)


def least_accelerators(problem: PlacementProblem, cost: int) -> int:
    """Return how many accelerators at least run something in a placement that costs no more than `cost`."""
    host = Host.of(problem)
    run = sum(unit.num_bytes + unit.run_bytes for unit in problem.units)
    tokens, size = sparsest(problem.units)
    if not tokens or not host.ram_cost:
        return 1
    # The most bytes that can be off the accelerators at this cost: in RAM first, then on disk.
    off = cost * size // (tokens * host.ram_cost)
    if off > host.ram_room:
        beyond = max(cost - host.ram_room * tokens * host.ram_cost // size, 0)
        off = max(host.ram_room, 0) + beyond * size // (tokens * host.disk_cost) + 1
    held, number = run - off, 0
    for room in sorted((room for _, room in problem.accelerators), reverse=True):
        if held <= 0:
            break
        held -= room
        number += 1
    return max(number, 1)


def _missing(problem: PlacementProblem) -> int:
    """Return the bytes of weights that find no room on the accelerators, at least."""
    run = [unit.num_bytes + unit.run_bytes for unit in problem.units]
    rooms = [room for _, room in problem.accelerators]
    unlike = set(rooms)
    if len(unlike) > MAX_UNLIKE_ROOMS:
        sums = {room: min(max(room, 0), sum(run)) for room in unlike}
    else:
        sums = {room: _largest_sum(run, room) for room in unlike}
    filled = [sums[room] for room in rooms]
    if sum(filled) >= sum(run):
        return 0
    reserved = problem.num_in_flight * min((unit.stream_bytes for unit in problem.units), default=0)
    beside = sum(unit.run_bytes for unit in problem.units)

    def executing(room: int) -> int:  # caches of streamed units fill gaps that whole units leave
        return min(max(room - reserved, 0), _largest_sum(run, room - reserved) + beside)

    total = max(sum(filled) - full + executing(room) for room, full in sums.items())
    return max(sum(run) - total, 0)


def _ram(problem: PlacementProblem, host: Host, offloaded: int) -> int:
    """Return the most bytes of weights that RAM holds when `offloaded` bytes have to be there or on disk."""
    if offloaded <= host.ram_room:
        return offloaded
    through = host.num_in_flight * min((unit.stream_bytes for unit in problem.units), default=0)
    return _largest_sum((unit.num_bytes for unit in problem.units), host.ram_room - through)


def _largest_sum(sizes: Iterable[int], limit: int) -> int:
    """Return the largest sum of some of `sizes` up to `limit`, or a little more where finding it would take long."""
    counts = Counter(size for size in sizes if size)
    total = sum(size * count for size, count in counts.items())
    if limit <= 0 or total <= limit:
        return min(max(limit, 0), total)
    kinds = [ItemKind(size, size, count) for size, count in counts.items() if size <= limit]
    found = choose(kinds, Bin(limit, 1), Bin(0, 0))
    return found.worth if found is not None and found.exact else limit


def _least_tokens(problem: PlacementProblem, num_bytes: int) -> int:
    """Return the bytes per token of any units that have `num_bytes` in all, at least: the sparsest ones."""
    tokens = 0
    for unit in sorted(problem.units, key=lambda unit: unit.token_bytes / unit.num_bytes if unit.num_bytes else 0):
        if num_bytes <= 0:
            break
        taken = min(unit.num_bytes, num_bytes)
        tokens += taken * unit.token_bytes // unit.num_bytes if unit.num_bytes else 0
        num_bytes -= taken
    return tokens
