"""What every policy answers, and the rule all of them obey: the workspace that streamed weights need.

A unit that lives in RAM or on disk but runs on an accelerator is brought in for each forward pass and dropped again.
While one computes, the next arrives, so the execution device keeps room for the two largest of them; where only one
fits, nothing arrives while it computes. Weights that come from disk pass through RAM, which keeps the same room for
the largest of those. A unit in RAM runs in place when there is no accelerator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bigload.devices import CPU, DISK, Device
from bigload.planning.budget import MemoryBudget
from bigload.planning.units import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A device for each unit, in the order of the units, and the device on which offloaded units run.

    `num_in_flight` streamed units are there at a time: 2, or 1 where there is no room to fetch ahead.
    """

    devices: tuple[Device, ...]
    execution_device: Device
    num_in_flight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """The best try of a policy that found no placement.

    `unplaced_bytes` found no device; `host_bytes` found no accelerator, so that much RAM would do without any disk.
    `workspace` is what the try reserved; `too_small` maps a device to bytes that, added to its limit, are enough for
    its workspace.
    """

    unplaced_bytes: int
    host_bytes: int
    workspace: Mapping[Device, int]
    too_small: Mapping[Device, int] = field(default_factory=dict)


class PlacementPolicy(Protocol):
    """A pure function: units in execution order and a budget in, a placement that keeps every limit out."""

    def __call__(self, units: Sequence[Unit], budget: MemoryBudget) -> Placement | Misfit: ...


def workspace(units: Sequence[Unit], placement: Placement, budget: MemoryBudget) -> dict[Device, int]:
    """Return the bytes to keep free on each device for streamed units; devices that need none are left out.

    Example: blocks of 5, 4 and 3 bytes on cpu, cpu and disk, cuda:0 executes, two in flight: cuda:0 keeps 5 + 4, cpu
    keeps 3.
    """
    execution = placement.execution_device
    on_cpu = [unit.num_bytes for unit, device in zip(units, placement.devices, strict=True) if device == CPU]
    on_disk = [unit.num_bytes for unit, device in zip(units, placement.devices, strict=True) if device == DISK]
    count = placement.num_in_flight
    needs = {execution: largest(on_disk if execution == CPU else on_disk + on_cpu, count)}
    if execution != CPU and budget.has_cpu:
        needs[CPU] = largest(on_disk, count)
    return {device: needed for device, needed in needs.items() if needed}


def largest(sizes: Iterable[int], count: int) -> int:
    """Return the bytes of the `count` largest of `sizes`."""
    return sum(sorted(sizes, reverse=True)[:count])


Capacities = Sequence[tuple[Device, int | None]]
"""Room for weights on devices, in the order in which they are filled; `None` is unbounded."""


def fill(units: Sequence[Unit], capacities: Capacities) -> list[Device]:
    """Return the devices of the units that fit when devices are filled in order; the units past them are left over.

    No other assignment in this order, with units in theirs, places more of them.
    """
    placed: list[Device] = []
    for device, capacity in capacities:
        used = 0
        for unit in units[len(placed) :]:
            used += unit.num_bytes
            if capacity is not None and used > capacity:
                break
            placed.append(device)
    return placed
