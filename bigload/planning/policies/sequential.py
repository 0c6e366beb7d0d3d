"""Fill the devices one after the other, in execution order, and never go back.

What makes this more than a loop is the workspace: it has to be kept free before it is known which units are streamed
through it. A larger workspace leaves room for fewer units, so what the rest needs only grows with what is reserved;
starting at nothing and reserving what was found missing therefore ends at the least workspace that is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bigload.devices import CPU, DISK, Device
from bigload.planning.budget import MemoryBudget
from bigload.planning.placement import Capacities, Misfit, Placement, fill, largest
from bigload.planning.units import Unit


def place_sequentially(units: Sequence[Unit], budget: MemoryBudget) -> Placement | Misfit:
    """Place `units` on accelerators first, then in RAM, then on disk.

    Example: blocks of 2, 2 and 2 bytes. With cuda:0=6 all three fit. With cuda:0=5 and cpu=6, streaming two blocks
    takes 4 bytes of workspace on cuda:0, which leaves room for none, so all three go to the cpu. With cpu=5, the cpu
    keeps 4 bytes of workspace for what comes from disk, and all three go there. With cuda:0=3, there is room for one
    block at a time, and none is fetched ahead.
    """
    found = _place(units, budget, num_in_flight=2)
    return found if isinstance(found, Placement) else _place(units, budget, num_in_flight=1)


def _place(units: Sequence[Unit], budget: MemoryBudget, *, num_in_flight: int) -> Placement | Misfit:
    accelerators = [(device, limit) for device, limit in budget if device.is_accelerator]
    if not accelerators:
        return _place_on_host(units, budget, num_in_flight)
    misfits = []
    for first in range(len(accelerators)):
        found = _place_from(units, accelerators[first:], budget, num_in_flight)
        if isinstance(found, Placement):
            return found
        misfits.append(found)
    return min(misfits, key=lambda misfit: (bool(misfit.too_small), misfit.unplaced_bytes))


def _place_from(
    units: Sequence[Unit], accelerators: Capacities, budget: MemoryBudget, num_in_flight: int
) -> Placement | Misfit:
    """Place `units`, streaming through the first of `accelerators`.

    Offloaded units run on the device that the first unit is on, as with accelerate. So if the first accelerator can
    hold nothing beside the workspace, while another holds something, this is no answer; the caller goes on without it.
    """
    execution, limit = accelerators[0]
    assert limit is not None, "only the disk is unbounded"
    placed, reserve = _fill_beside_workspace(units, accelerators, num_in_flight)
    if reserve > limit or (placed and placed[0] != execution):
        # Enough for sure: all units streamed, and the first one here rather than on the next accelerator.
        enough = largest((unit.num_bytes for unit in units), num_in_flight)
        enough += units[0].num_bytes if len(accelerators) > 1 else 0
        return Misfit(unplaced_bytes=0, host_bytes=0, workspace={}, too_small={execution: enough - limit})
    host = _place_on_host(units[len(placed) :], budget, num_in_flight)
    if isinstance(host, Misfit):
        return replace(host, workspace={execution: reserve, **host.workspace})
    return replace(host, devices=(*placed, *host.devices), execution_device=execution)


def _place_on_host(units: Sequence[Unit], budget: MemoryBudget, num_in_flight: int) -> Placement | Misfit:
    """Place units in RAM and on disk; RAM keeps room for those that come from disk."""
    limit = budget.get(CPU) or 0
    if budget.has_disk and budget.has_cpu:
        placed, reserve = _fill_beside_workspace(units, [(CPU, limit)], num_in_flight)
        if reserve > limit:
            enough = largest((unit.num_bytes for unit in units), num_in_flight)
            return Misfit(unplaced_bytes=0, host_bytes=0, workspace={}, too_small={CPU: enough - limit})
    else:
        placed, reserve = fill(units, [(CPU, limit)]), 0
    on_disk = fill(units[len(placed) :], [(DISK, budget.get(DISK))])
    unplaced = units[len(placed) + len(on_disk) :]
    if unplaced:
        return Misfit(
            unplaced_bytes=sum(unit.num_bytes for unit in unplaced),
            host_bytes=sum(unit.num_bytes for unit in units),
            workspace={CPU: reserve} if reserve else {},
        )
    return Placement(devices=(*placed, *on_disk), execution_device=CPU, num_in_flight=num_in_flight)


def _fill_beside_workspace(units: Sequence[Unit], devices: Capacities, num_in_flight: int) -> tuple[list[Device], int]:
    """Fill `devices`, the first of which also streams what is left over; return the devices and its workspace."""
    (first, limit), *others = devices
    assert limit is not None, "only the disk is unbounded"
    reserve = 0
    while True:
        placed = fill(units, [(first, limit - reserve), *others])
        needed = largest((unit.num_bytes for unit in units[len(placed) :]), num_in_flight)
        if needed <= reserve or reserve > limit:
            return placed, reserve
        reserve = needed
