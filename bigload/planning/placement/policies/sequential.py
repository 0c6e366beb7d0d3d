"""Fill the devices one after the other, in execution order, and never go back.

What makes this more than a loop is the workspace: it has to be kept free before it is known which units are streamed
through it. A larger workspace leaves room for fewer units, so what the rest needs only grows with what is reserved;
starting at nothing and reserving what was found missing therefore ends at the least workspace that is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bigload.devices import CPU, DISK, Device
from bigload.planning.model.units import Unit
from bigload.planning.placement.problem import Misfit, Placement, PlacementProblem


def place_sequentially(problem: PlacementProblem) -> Placement | Misfit:
    """Place units on accelerators first, then in RAM, then on disk.

    Example: four blocks of 2 bytes. With cuda:0=8 all fit. With cuda:0=5 and cpu=6, streaming takes 2 bytes of
    workspace on cuda:0, which leaves room for one block; three go to the cpu. With cpu=5, the cpu keeps 2 bytes for
    what comes from disk, which leaves room for one there; two go to disk.
    """
    accelerators = problem.accelerators
    if not accelerators:
        return _run_on_host(problem)
    misfits = []
    for first in roomier(accelerators):
        found = _place_from(problem, accelerators[first:])
        if isinstance(found, Placement):
            return found
        misfits.append(found)
    return min(misfits, key=lambda misfit: (bool(misfit.too_small), misfit.unplaced_bytes))


def place_streamed(problem: PlacementProblem) -> Placement | Misfit:
    """Keep all units in RAM and on disk, and run them on the first accelerator that has room for what is streamed.

    Without accelerators RAM runs them.
    """
    accelerators = problem.accelerators
    if not accelerators:
        return _run_on_host(problem)
    needed = _streaming(problem, problem.units)
    rooms = dict(accelerators)
    execution = next((device for device, room in accelerators if room >= needed), max(rooms, key=rooms.__getitem__))
    if needed > rooms[execution]:
        return Misfit(too_small={execution: needed - rooms[execution]})
    host = _place_on_host(problem, problem.units, problem.budget.get(CPU) or 0)
    if isinstance(host, Misfit):
        return replace(host, workspace={execution: _buffers(problem, problem.units), **host.workspace})
    return replace(host, execution_device=execution)


def roomier(rooms: Sequence[tuple[Device, int]]) -> list[int]:
    """Return the indexes of accelerators with more room than every one before them.

    Only these need to be tried as the first that is used: in place of another, an earlier one holds no less, and no
    fewer come after it.
    """
    found: list[int] = []
    for index, (_, room) in enumerate(rooms):
        if not found or room > rooms[found[-1]][1]:
            found.append(index)
    return found


def _place_from(problem: PlacementProblem, accelerators: Sequence[tuple[Device, int]]) -> Placement | Misfit:
    """Place units, streaming through the first of `accelerators`.

    Offloaded units run on the device that the first unit is on, as with accelerate. So if the first accelerator can
    hold nothing beside the workspace, while another holds something, this is no answer; the caller goes on without it.
    """
    units = problem.units
    execution, room = accelerators[0]
    sizes = [unit.num_bytes + unit.run_bytes for unit in units]
    placed, reserve = _fill_beside_workspace(sizes, accelerators, lambda held: _streaming(problem, units[held:]))
    if reserve > room or (placed and placed[0] != execution):
        # Enough for sure: all units streamed, and the first one here rather than on the next accelerator.
        enough = _streaming(problem, units)
        enough += units[0].num_bytes if len(accelerators) > 1 else 0
        return Misfit(too_small={execution: enough - room})
    host = _place_on_host(problem, units[len(placed) :], problem.budget.get(CPU) or 0)
    if isinstance(host, Misfit):
        return replace(host, workspace={execution: reserve, **host.workspace})
    return replace(host, devices=(*placed, *host.devices), execution_device=execution)


def _run_on_host(problem: PlacementProblem) -> Placement | Misfit:
    """Place units in RAM, beside what they need to run there, and on disk."""
    limit = problem.budget.get(CPU) or 0
    room = (problem.room(CPU) or 0) - sum(unit.run_bytes for unit in problem.units)
    found = _place_on_host(problem, problem.units, room)
    if isinstance(found, Placement) or found.too_small:
        return found
    lacking = max(-room, 0)  # for the caches, before any weight
    return replace(found, unplaced_bytes=found.unplaced_bytes + lacking, host_bytes=found.host_bytes + limit - room)


def _place_on_host(problem: PlacementProblem, units: Sequence[Unit], ram: int) -> Placement | Misfit:
    """Place units in RAM, of which `ram` bytes are for weights, and on disk; what comes from there passes through RAM.

    Without accelerators RAM runs what is on disk, and its buffers are the workspace.
    """
    budget, sizes = problem.budget, [unit.num_bytes for unit in units]
    if budget.has_disk and budget.has_cpu:
        placed, reserve = _fill_beside_workspace(sizes, [(CPU, ram)], lambda held: _buffers(problem, units[held:]))
        if reserve > ram:
            enough = _buffers(problem, units)
            return Misfit(too_small={CPU: enough - ram})
    else:
        placed, reserve = fill(sizes, [(CPU, ram)]), 0
    on_disk = fill(sizes[len(placed) :], [(DISK, budget.get(DISK))])
    unplaced = units[len(placed) + len(on_disk) :]
    if unplaced:
        return Misfit(
            unplaced_bytes=sum(unit.num_bytes for unit in unplaced),
            host_bytes=sum(unit.num_bytes for unit in units),
            workspace={CPU: reserve} if reserve else {},
        )
    return Placement(devices=(*placed, *on_disk), execution_device=CPU, num_in_flight=problem.num_in_flight)


def _fill_beside_workspace(
    sizes: Sequence[int], devices: Capacities, needed: Callable[[int], int]
) -> tuple[list[Device], int]:
    """Fill devices, the first beside the workspace for what is left over; return the devices and the workspace.

    `needed` says how many bytes the units take there that follow the first so many.
    """
    (first, room), *others = devices
    assert room is not None, "only the disk is unbounded"
    reserve = 0
    while True:
        placed = fill(sizes, [(first, room - reserve), *others])
        more = needed(len(placed))
        if more <= reserve or reserve > room:
            return placed, reserve
        reserve = more


def _buffers(problem: PlacementProblem, units: Sequence[Unit]) -> int:
    """Return the bytes of the buffers through which `units` are streamed."""
    return problem.num_in_flight * max((unit.stream_bytes for unit in units), default=0)


def _streaming(problem: PlacementProblem, units: Sequence[Unit]) -> int:
    """Return the bytes that streaming `units` takes on the device that runs them: buffers, and their caches."""
    return _buffers(problem, units) + sum(unit.run_bytes for unit in units)


Capacities = Sequence[tuple[Device, int | None]]
"""Room on devices, in the order in which they are filled; `None` is unbounded."""


def fill(sizes: Sequence[int], capacities: Capacities) -> list[Device]:
    """Return the devices of the things that fit when devices are filled in order; those past them are left over.

    No other assignment in this order, with things in theirs, places more of them.
    """
    placed: list[Device] = []
    for device, capacity in capacities:
        used = 0
        for index in range(len(placed), len(sizes)):
            used += sizes[index]
            if capacity is not None and used > capacity:
                break
            placed.append(device)
    return placed
