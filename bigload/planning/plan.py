"""The plan: which device holds which module, and what that costs each device.

A plan is data. It names modules, devices and bytes, it can be checked against the checkpoint it was made for, and the
same inputs give the same plan to the last byte of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bigload.checkpoint.fingerprint import ShardFingerprint
from bigload.checkpoint.model import TensorInfo
from bigload.devices import CPU, DISK, Device
from bigload.errors import InvalidPlanError
from bigload.planning.policies.policy import Policy
from bigload.planning.tree import is_index
from bigload.units import common_unit, format_size


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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "device_map": dict(self.device_map)}

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
