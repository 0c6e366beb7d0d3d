"""Make a plan: which device holds which module, and what that costs each device.

A plan is data. It names modules, devices and bytes, it can be checked against the checkpoint it was made for, and the
same inputs give the same plan to the last byte of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from bigload.checkpoint.fingerprint import ShardFingerprint, fingerprint
from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import CPU, DISK, Device
from bigload.errors import DoesNotFitError, InvalidPlanError
from bigload.planning.budget import MemoryBudget
from bigload.planning.placement import Misfit, Placement, workspace
from bigload.planning.policies.policy import Policy
from bigload.planning.policies.registry import POLICIES
from bigload.planning.ties import TiedGroup, find_ties
from bigload.planning.tree import build_tree, is_index
from bigload.planning.units import Unit, cut_into_units
from bigload.units import GIB, KIB, MIB, common_unit, format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One row of the plan: `budget_bytes = weights_bytes + workspace_bytes + free_bytes`.

    Budget and free are `None` for a disk without a limit. `modules` are in execution order.
    """

    device: Device
    budget_bytes: int | None
    weights_bytes: int
    workspace_bytes: int
    modules: tuple[str, ...]

    @property
    def free_bytes(self) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - self.weights_bytes - self.workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """Something worth knowing about a plan: a stable `code` and one sentence."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where every tensor of a checkpoint goes.

    Attributes:
        checkpoint_path: The checkpoint as the user named it.
        total_bytes: Bytes of all its tensors.
        shards: Its fingerprint; a plan is void for a checkpoint with another.
        policy: What made the choice.
        execution_device: Where modules on `cpu` and `disk` run, except that RAM runs its own when this is `cpu`.
        device_map: Module to device, as accelerate and transformers take it: every tensor is below exactly one key.
        devices: One row per device of the budget, in its order.
    """

    checkpoint_path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]
    policy: Policy
    execution_device: Device
    device_map: Mapping[str, str]
    devices: tuple[DeviceUse, ...]
    notes: tuple[PlanNote, ...] = ()

    @property
    def name(self) -> str:
        """What tables and messages call the checkpoint."""
        return Path(self.checkpoint_path).name or Path(self.checkpoint_path).resolve().name

    def device_of(self, tensor_name: str) -> Device:
        """Return the device of a tensor.

        Raises:
            InvalidPlanError: no key of the device map covers it.
        """
        name = tensor_name
        while (device := self._devices.get(name)) is None:
            name, dot, _ = name.rpartition(".")
            if not dot:
                raise InvalidPlanError(f"the device map gives no device to tensor {tensor_name!r}")
        return device

    @cached_property
    def _devices(self) -> dict[str, Device]:
        return {module: Device.parse(device) for module, device in self.device_map.items()}

    def weights_on(self, device: Device) -> int:
        """Return the bytes of weights that live on `device`."""
        return sum(use.weights_bytes for use in self.devices if use.device == device)

    @property
    def streamed_bytes(self) -> Mapping[Device, int]:
        """Bytes that each forward pass brings to the execution device, by where they come from."""
        sources = (DISK,) if self.execution_device == CPU else (CPU, DISK)
        return {source: self.weights_on(source) for source in sources if self.weights_on(source)}

    @property
    def used_devices(self) -> tuple[DeviceUse, ...]:
        """The rows worth showing: all but a disk without a limit that holds nothing."""
        return tuple(use for use in self.devices if use.budget_bytes is not None or use.weights_bytes)

    @property
    def table_unit(self) -> tuple[str, int]:
        """Name and bytes of the unit in which this plan's figures read best."""
        return common_unit(use.budget_bytes or use.weights_bytes for use in self.used_devices)

    def table_figures(self, use: DeviceUse) -> tuple[str, str, str, str]:
        """Return budget, weights, workspace and free of a row in `table_unit`; a dash for none."""
        name, factor = self.table_unit
        digits = 0 if name == "B" else 2
        sizes = (use.budget_bytes, use.weights_bytes or None, use.workspace_bytes or None, use.free_bytes)
        budget, weights, reserved, free = ("-" if size is None else f"{size / factor:.{digits}f}" for size in sizes)
        return budget, weights, reserved, free

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("DEVICE", "BUDGET", "WEIGHTS", "WORKSPACE", "FREE", "HOLDS")]
        rows += [(str(use.device), *self.table_figures(use), summarize(use.modules)) for use in self.used_devices]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(width) for cell, width in zip(row[1:5], widths[1:], strict=True)),
                    row[5],
                ]
            ).rstrip()
            for row in rows
        ]
        return "\n".join(
            [f"{self.name}, {format_size(self.total_bytes)}, {self.policy} policy, {self.table_unit[0]}", *lines]
        )


def plan(
    checkpoint: Checkpoint | str | Path,
    max_memory: MemoryBudget | Mapping[str | int, str | int],
    *,
    policy: Policy | str = Policy.SEQUENTIAL,
) -> Plan:
    """Assign every module of `checkpoint` to one device of `max_memory`.

    Weights count as they are stored. `max_memory` maps devices to sizes, `{"cuda:0": "22GiB", "cpu": "64GiB"}`; what
    finds no room goes to disk, unless `MemoryBudget.of(..., use_disk=False)` forbids that.

    Raises:
        DoesNotFitError: the policy found no placement that keeps every limit; the error says what is short where.
        BudgetError: `max_memory` names an unknown device or a size that cannot be read.
        CheckpointError: the checkpoint cannot be opened.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    budget = max_memory if isinstance(max_memory, MemoryBudget) else MemoryBudget.of(max_memory)
    ties = find_ties(opened)
    units = cut_into_units(build_tree(opened.tensors.values()), ties)
    placement = POLICIES[Policy(policy)](units, budget)
    if isinstance(placement, Misfit):
        raise _does_not_fit(opened, units, budget, placement)
    device_map = _device_map(units, placement, ties)
    devices = tuple(_device_uses(units, placement, budget, device_map))
    return Plan(
        checkpoint_path=opened.path,
        total_bytes=opened.total_bytes,
        shards=fingerprint(opened),
        policy=Policy(policy),
        execution_device=placement.execution_device,
        device_map=MappingProxyType(device_map),
        devices=devices,
        notes=tuple(_notes(devices, placement, ties)),
    )


def recount(plan: Plan, tensors: Iterable[TensorInfo]) -> dict[Device, int]:
    """Return the bytes of `tensors` per device under `plan`'s device map, counted one by one.

    Raises:
        InvalidPlanError: a tensor has no device, or one on a device that the plan does not list.
    """
    totals = {use.device: 0 for use in plan.devices}
    for tensor in tensors:
        device = plan.device_of(tensor.name)
        if device not in totals:
            raise InvalidPlanError(f"tensor {tensor.name!r} is mapped to {device}, which the plan does not list")
        totals[device] += tensor.num_bytes
    return totals


def summarize(modules: Sequence[str]) -> str:
    """Return module names the short way, runs of blocks folded.

    >>> summarize(["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"])
    'embed_tokens, layers 0-2, lm_head'
    """
    words: list[str] = []
    runs: list[tuple[str, list[int]]] = []
    for module in modules:
        parent, _, last = module.rpartition(".")
        if is_index(last) and parent:
            if runs and runs[-1][0] == parent and runs[-1][1] and runs[-1][1][-1] + 1 == int(last):
                runs[-1][1].append(int(last))
            else:
                runs.append((parent, [int(last)]))
        else:
            runs.append((module, []))
    for name, numbers in runs:
        short = name.removeprefix("model.").removeprefix("transformer.")
        span = "" if not numbers else f" {numbers[0]}" if len(numbers) == 1 else f" {numbers[0]}-{numbers[-1]}"
        words.append(short + span)
    return ", ".join(words)


def _device_map(units: Sequence[Unit], placement: Placement, ties: Sequence[TiedGroup]) -> dict[str, str]:
    device_map = {
        part.name: str(device) for unit, device in zip(units, placement.devices, strict=True) for part in unit.parts
    }
    for tie in ties:
        home = next(device for name, device in device_map.items() if f"{tie.stored[0]}.".startswith(f"{name}."))
        device_map.update(dict.fromkeys(tie.absent_modules, home))
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


def _notes(devices: Sequence[DeviceUse], placement: Placement, ties: Sequence[TiedGroup]) -> Iterator[PlanNote]:
    held = {use.device: use.weights_bytes for use in devices}
    if held.get(DISK):
        enough = f"cpu={_round_up(held.get(CPU, 0) + held[DISK])}"
        yield PlanNote(code="disk-used", text=f"with {enough} nothing would stay on disk")
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
        first, *stored = (name.rpartition(".")[0] for name in tie.stored)
        # A head of several layers is one module to people.
        roots = dict.fromkeys(name.split(".")[0] if name.startswith("lm_head.") else name for name in stored)
        others = ", ".join([*roots, *(f"{module} (not stored)" for module in tie.absent_modules)])
        yield PlanNote(code="tied", text=f"tied to {first}, so on one device with it: {others}")


def _does_not_fit(
    checkpoint: Checkpoint, units: Sequence[Unit], budget: MemoryBudget, misfit: Misfit
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
        hint=_what_would_fit(budget, misfit),
    )


def _what_would_fit(budget: MemoryBudget, misfit: Misfit) -> str:
    if misfit.too_small:
        device, lacking = next(iter(misfit.too_small.items()))
        others = [other for other, _ in budget if other not in (device, DISK)]
        leave_out = ", or leave it out" if others else ""
        return f"raise {device} to {_round_up((budget.get(device) or 0) + lacking)} or more{leave_out}"
    cpu = f"cpu={_round_up(misfit.host_bytes)}"
    action = "raise cpu: -m" if budget.has_cpu else "add -m"
    return f"{action} {cpu}" + ("" if budget.has_disk else ", or drop --no-disk")


def _round_up(num_bytes: int) -> str:
    """Return a size to type, not below `num_bytes`: whole GiB, or whole MiB or KiB of small models."""
    name, factor = next(((n, f) for n, f in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)) if num_bytes >= f), ("KiB", KIB))
    return f"{-(-num_bytes // factor)}{name}"
