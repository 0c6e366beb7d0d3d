"""The question every policy answers, the form of the answer, and how many bytes an answer puts on each device.

A unit that lives in RAM or on disk but runs on an accelerator is streamed: brought in for each forward pass and dropped
again. The execution device keeps a workspace of one buffer for it, as large as the largest streamed unit, or of two,
so that the next arrives while one computes. Weights that come from disk pass through RAM, which keeps the same number
of buffers for the largest of those. A unit in RAM runs in place when there is no accelerator.

What a unit needs beside its weights, its KV cache above all, is on the device that runs it: the execution device for
streamed units. So are parameters that no hook would bring (`Part.is_held`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby, pairwise
from operator import itemgetter
from typing import NamedTuple, Protocol

from bigload.devices import CPU, DISK, Device
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Balance
from bigload.planning.model.units import Unit
from bigload.planning.options import Bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """Question to a policy.

    Attributes:
        units: The pieces of the model, in execution order.
        fixed_bytes: What a device needs as soon as it runs anything: overhead and activations.
        num_in_flight: Buffers for streamed units, 1 or 2.
        visits: Indexes of `units` in the order in which a forward pass runs them, where it runs some of them several
            times; `None` where it runs each once, in their order.
    """

    units: Sequence[Unit]
    budget: MemoryBudget
    fixed_bytes: Mapping[Device, int] = field(default_factory=dict)
    num_in_flight: int = 1
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    balance: Balance = Balance.SPREAD
    any_order: bool = False
    visits: Sequence[int] | None = None

    @property
    def accelerators(self) -> list[tuple[Device, int]]:
        """Accelerators with the bytes that units may take there; fewer than none where not even `fixed_bytes` fit."""
        return [
            (device, (limit or 0) - self.fixed_bytes.get(device, 0))
            for device, limit in self.budget
            if device.is_accelerator
        ]

    def room(self, device: Device) -> int | None:
        """Return the bytes that a device which runs units has for them; `None` when it is unbounded."""
        limit = self.budget.get(device)
        return None if limit is None else limit - self.fixed_bytes.get(device, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A device for each unit, in the order of the units, and the device on which streamed units run.

    `num_in_flight` streamed units are there at a time: 2, or 1 where there is no room to fetch ahead. `is_proven` tells
    that none takes less time per token, or as much and fewer device changes, of the placements with the units in order
    that stream to the first accelerator used, as accelerate and transformers do.
    """

    devices: tuple[Device, ...]
    execution_device: Device
    num_in_flight: int
    is_proven: bool = False

    @property
    def running(self) -> tuple[Device, ...]:
        """The device that runs each unit."""
        return tuple(device if device.is_accelerator else self.execution_device for device in self.devices)

    @property
    def num_device_changes(self) -> int:
        """Device changes with every unit run once: what policies compare, see `num_device_changes`."""
        return sum(one != other for one, other in pairwise(self.running))


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """The best try of a policy that found no placement.

    `unplaced_bytes` found no device; `host_bytes` found no accelerator, so that much RAM would do without any disk.
    Where RAM runs the model, what it needs to run is counted with both.
    `workspace` is what the try reserved; `too_small` maps a device to bytes that, added to its limit, are enough for
    its workspace.
    """

    unplaced_bytes: int = 0
    host_bytes: int = 0
    workspace: Mapping[Device, int] = field(default_factory=dict)
    too_small: Mapping[Device, int] = field(default_factory=dict)


def num_device_changes(problem: PlacementProblem, placement: Placement) -> int:
    """Return how often a forward pass moves on to another device, tied and shared units run as often as they are."""
    running = placement.running
    visits = range(len(running)) if problem.visits is None else problem.visits
    return sum(running[one] != running[other] for one, other in pairwise(visits))


class PlacementPolicy(Protocol):
    """A pure function: a problem in, a placement that keeps every limit out."""

    def __call__(self, problem: PlacementProblem) -> Placement | Misfit: ...


class DeviceLoad(NamedTuple):
    """The bytes that a placement puts on one device, apart from what is free."""

    weights: int = 0
    cache: int = 0
    logits: int = 0
    fixed: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.logits + self.fixed + self.workspace


def device_loads(problem: PlacementProblem, placement: Placement) -> dict[Device, DeviceLoad]:
    """Return what `placement` puts on each device of the budget.

    This is the one place where a placement is counted; policies search by sums of their own and are checked by it.
    """
    reserved = workspace(problem, placement)
    at_home = _gathered(problem.units, placement.devices)
    running = _gathered(problem.units, placement.running)
    loads = {}
    for device, _ in problem.budget:
        held, run = at_home.get(device, ()), running.get(device, ())
        loads[device] = DeviceLoad(
            weights=sum(unit.num_bytes for unit in held) + sum(unit.held_bytes for unit in run),
            cache=sum(unit.cache_bytes for unit in run),
            logits=sum(unit.logits_bytes for unit in run),
            fixed=problem.fixed_bytes.get(device, 0) if run else 0,
            workspace=reserved.get(device, 0),
        )
    return loads


def _gathered(units: Sequence[Unit], devices: Sequence[Device]) -> dict[Device, list[Unit]]:
    """Return the units of each device; by runs, because comparing devices one by one is slow for many units."""
    found: dict[Device, list[Unit]] = {}
    for device, members in groupby(zip(units, devices, strict=True), key=itemgetter(1)):
        found.setdefault(device, []).extend(unit for unit, _ in members)
    return found


def keeps_limits(problem: PlacementProblem, placement: Placement) -> bool:
    """Return whether every device has room for what `placement` puts there."""
    return not lacking_bytes(problem, device_loads(problem, placement))


def lacking_bytes(problem: PlacementProblem, loads: Mapping[Device, DeviceLoad]) -> dict[Device, int]:
    """Return by how much each device exceeds its limit, without those that do not."""
    limits = {device: limit for device, limit in problem.budget if limit is not None}
    return {device: loads[device].total - limit for device, limit in limits.items() if loads[device].total > limit}


def fullest_share(problem: PlacementProblem, loads: Mapping[Device, DeviceLoad]) -> Fraction:
    """Return the share of its limit that the fullest accelerator takes; 0 without accelerators."""
    limits = [(device, limit) for device, limit in problem.budget if device.is_accelerator and limit]
    return max((Fraction(loads[device].total, limit) for device, limit in limits), default=Fraction(0))


def workspace(problem: PlacementProblem, placement: Placement) -> dict[Device, int]:
    """Return the bytes to keep free on each device for streamed units; devices that need none are left out.

    Example: blocks of 5, 4 and 3 bytes on cpu, cpu and disk, cuda:0 executes, two in flight: cuda:0 keeps 2 x 5, cpu
    keeps 2 x 3.
    """
    execution = placement.execution_device
    placed = _gathered(problem.units, placement.devices)
    from_ram = max((unit.stream_bytes for unit in placed.get(CPU, ())), default=0)
    from_disk = max((unit.stream_bytes for unit in placed.get(DISK, ())), default=0)
    needs = {execution: from_disk if execution == CPU else max(from_disk, from_ram)}
    if execution != CPU and problem.budget.has_cpu:
        needs[CPU] = from_disk
    return {device: needed * placement.num_in_flight for device, needed in needs.items() if needed}


def fetch_ahead(problem: PlacementProblem, placement: Placement) -> Placement:
    """Return `placement` with two units in flight if the room that it leaves free allows that."""
    ahead = replace(placement, num_in_flight=2)
    return ahead if keeps_limits(problem, ahead) else placement
