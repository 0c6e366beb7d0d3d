"""Make a plan: cut the model into units, let a policy place them, and say what that costs each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from bigload.checkpoint.fingerprint import fingerprint
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import DISK
from bigload.errors import DoesNotFitError, PlanError
from bigload.planning.advice import limits_that_fit, ram_without_disk
from bigload.planning.budget import MaxMemory, MemoryBudget
from bigload.planning.placement import Misfit, Placement, PlacementPolicy, workspace
from bigload.planning.plan import DeviceUse, Plan, PlanNote
from bigload.planning.policies.policy import Policy
from bigload.planning.policies.registry import POLICIES
from bigload.planning.ties import TiedGroup, find_ties
from bigload.planning.tree import build_tree
from bigload.planning.units import Unit, cut_into_units
from bigload.units import format_size


def plan(
    checkpoint: Checkpoint | str | Path,
    max_memory: MemoryBudget | MaxMemory,
    *,
    policy: Policy | str = Policy.SEQUENTIAL,
) -> Plan:
    """Assign every module of `checkpoint` to one device of `max_memory`.

    Weights count as they are stored. `max_memory` maps devices to sizes, `{"cuda:0": "22GiB", "cpu": "64GiB"}`; what
    finds no room goes to disk, unless `MemoryBudget.of(..., use_disk=False)` forbids that.

    Raises:
        DoesNotFitError: the policy found no placement that keeps every limit; the error says what is short where.
        BudgetError: `max_memory` names an unknown device or a size that cannot be read.
        PlanError: there is no such policy.
        CheckpointError: the checkpoint cannot be opened.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    budget = max_memory if isinstance(max_memory, MemoryBudget) else MemoryBudget.of(max_memory)
    ties = find_ties(opened)
    units = cut_into_units(build_tree(opened.tensors.values()), ties)
    place = POLICIES[_policy(policy)]
    placement = place(units, budget)
    if isinstance(placement, Misfit):
        raise _does_not_fit(opened, units, budget, placement, place)
    device_map = _device_map(units, placement, ties)
    devices = tuple(_device_uses(units, placement, budget, device_map))
    ram = ram_without_disk(units, budget, placement, place) if DISK in placement.devices else None
    return Plan(
        checkpoint_path=opened.path,
        total_bytes=opened.total_bytes,
        shards=fingerprint(opened),
        policy=_policy(policy),
        execution_device=placement.execution_device,
        device_map=MappingProxyType(device_map),
        devices=devices,
        notes=tuple(_notes(devices, placement, ties, ram)),
    )


def _policy(name: Policy | str) -> Policy:
    try:
        return Policy(name)
    except ValueError:
        known = ", ".join(Policy)
        raise PlanError(f"no policy {name!r}", hint=f"known are {known}") from None


def _device_map(units: Sequence[Unit], placement: Placement, ties: Sequence[TiedGroup]) -> dict[str, str]:
    device_map = {
        part.name: str(device) for unit, device in zip(units, placement.devices, strict=True) for part in unit.parts
    }
    for tie in ties:
        home = next(device for name, device in device_map.items() if f"{tie.stored[0]}.".startswith(f"{name}."))
        covered = tuple(f"{name}." for name in device_map)
        device_map.update({module: home for module in tie.absent_modules if not f"{module}.".startswith(covered)})
    return device_map


def _device_uses(
    units: Sequence[Unit], placement: Placement, budget: MemoryBudget, device_map: Mapping[str, str]
) -> Iterator[DeviceUse]:
    reserved = workspace(units, placement, budget)
    for device, limit in budget:
        held = [unit for unit, home in zip(units, placement.devices, strict=True) if home == device]
        yield DeviceUse(
            device=device,
            budget_bytes=limit,
            weights_bytes=sum(unit.num_bytes for unit in held),
            workspace_bytes=reserved.get(device, 0),
            modules=tuple(module for module, home in device_map.items() if home == str(device)),
        )


def _notes(
    devices: Sequence[DeviceUse], placement: Placement, ties: Sequence[TiedGroup], ram: str | None
) -> Iterator[PlanNote]:
    if ram is not None:
        yield PlanNote(code="disk-used", text=f"with {ram} nothing would stay on disk")
    if placement.num_in_flight == 1 and any(use.workspace_bytes for use in devices):
        text = "there is room for one streamed module at a time, so none can arrive while another computes"
        yield PlanNote(code="no-prefetch", text=text)
    for use in devices:
        if use.device.is_accelerator and not use.weights_bytes:
            spare = (
                "it only runs what is streamed to it" if use.device == placement.execution_device else "it is not used"
            )
            yield PlanNote(code="device-empty", text=f"{use.device} holds no weights; {spare}")
    for tie in ties:
        first, *stored = dict.fromkeys(_key_of(name, devices) for name in tie.stored)
        others = ", ".join([*stored, *(f"{module} (not stored)" for module in tie.absent_modules)])
        if others:
            yield PlanNote(code="tied", text=f"tied to {first}, so on one device with it: {others}")


def _key_of(tensor_name: str, devices: Sequence[DeviceUse]) -> str:
    """Return the key of the device map that covers a tensor."""
    return next(module for use in devices for module in use.modules if f"{tensor_name}.".startswith(f"{module}."))


def _does_not_fit(
    checkpoint: Checkpoint, units: Sequence[Unit], budget: MemoryBudget, misfit: Misfit, policy: PlacementPolicy
) -> DoesNotFitError:
    rows, usable = [], 0
    width = max(len(str(device)) for device, _ in budget)
    for device, limit in budget:
        if limit is None:
            continue
        reserved = misfit.workspace.get(device, 0)
        usable += limit - reserved
        minus = f" - {format_size(reserved)} workspace = {format_size(limit - reserved)}" if reserved else ""
        rows.append(f"{device!s:<{width}}  {format_size(limit):>12}{minus}")
    shortfalls = {str(device): lacking for device, lacking in misfit.too_small.items()}
    if misfit.unplaced_bytes:
        shortfalls["total"] = misfit.unplaced_bytes
    biggest = max(units, key=lambda unit: unit.num_bytes, default=None)
    if misfit.too_small and biggest is not None:
        size = format_size(biggest.num_bytes)
        rows.append(f"what is streamed needs room there; the largest module is {biggest.name}, {size}")
    return DoesNotFitError(
        checkpoint.name,
        needed_bytes=checkpoint.total_bytes,
        usable_bytes=usable,
        shortfalls=shortfalls,
        details=rows,
        hint=_hint(units, budget, misfit, policy),
    )


def _hint(units: Sequence[Unit], budget: MemoryBudget, misfit: Misfit, policy: PlacementPolicy) -> str | None:
    enough = limits_that_fit(units, budget, misfit, policy)
    would_do = f"this would do: {enough}" if enough else None
    if budget.has_disk or isinstance(policy(units, MemoryBudget((*budget.limits, (DISK, None)))), Misfit):
        return would_do
    return f"{would_do}, or drop --no-disk" if would_do else "drop --no-disk"
