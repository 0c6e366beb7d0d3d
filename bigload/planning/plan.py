"""The plan: which device holds which module, and what that costs each device.

A plan is data. It names modules, devices and bytes, it can be checked against the checkpoint it was made for, and the
same inputs give the same plan to the last byte of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

from bigload.checkpoint.fingerprint import ShardFingerprint
from bigload.checkpoint.model import TensorInfo
from bigload.devices import CPU, DISK, Device
from bigload.errors import InvalidPlanError
from bigload.planning.load_dtype import as_loaded
from bigload.planning.model.module_tree import is_index
from bigload.planning.options import PlanOptions
from bigload.planning.placement.optimality import Certificate
from bigload.units import common_unit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """One row of the plan, an equation of bytes: the budget is the sum of all that follows, and what is free.

    Attributes:
        device: The device.
        budget_bytes: Its limit, `None` for a disk without one.
        weights_bytes: Weights that live there.
        kv_bytes: Caches and recurrent states of the blocks that run there.
        logits_bytes: What the head returns, if it runs there.
        activation_bytes: One buffer for what blocks compute.
        overhead_bytes: What the device takes besides: context, kernels, slack.
        workspace_bytes: Room for streamed weights.
        modules: Keys of the device map, in execution order.
    """

    device: Device
    budget_bytes: int | None
    weights_bytes: int
    kv_bytes: int = 0
    logits_bytes: int = 0
    activation_bytes: int = 0
    overhead_bytes: int = 0
    workspace_bytes: int
    modules: tuple[str, ...]

    @property
    def run_bytes(self) -> int:
        """What running takes beside weights and caches: logits, activations and overhead."""
        return self.logits_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def used_bytes(self) -> int:
        return sum(getattr(self, f"{term}_bytes") for term in TERMS)

    @property
    def free_bytes(self) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes


TERMS = ("weights", "kv", "logits", "activation", "overhead", "workspace")
"""What takes memory on a device, in the order in which equations show it."""


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
        total_bytes: Bytes of all its tensors, as stored.
        shards: Its fingerprint; a plan is void for a checkpoint with another.
        options: What was asked for beside the budget.
        execution_device: Where modules on `cpu` and `disk` run, except that RAM runs its own when this is `cpu`.
        homes: Module, by its name in the checkpoint, to device: every tensor is below exactly one key, unless it is
            left out.
        devices: One row per device of the budget, in its order.
        certificate: How far from the best the plan is at most.
        num_device_changes: How often a forward pass moves on to another device.
        token_bytes: Weights that one token needs from RAM and from disk, for routed experts those chosen.
        left_out: Modules without a device, because no ordinary forward pass runs them.
        shared: Stored tensors that take no memory, because they are copies of others.
        renamed: Names that `options.names` asks for to device, `None` where they are those of the checkpoint.
        notes: Whatever else there is to know.
    """

    checkpoint_path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]
    options: PlanOptions
    execution_device: Device
    homes: Mapping[str, Device]
    devices: tuple[DeviceUse, ...]
    certificate: Certificate
    num_device_changes: int
    token_bytes: Mapping[Device, int]
    left_out: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    renamed: Mapping[str, Device] | None = None
    notes: tuple[PlanNote, ...] = ()

    @property
    def name(self) -> str:
        """What tables and messages call the checkpoint."""
        return Path(self.checkpoint_path).name or Path(self.checkpoint_path).resolve().name

    @property
    def policy(self) -> str:
        return self.options.policy

    @property
    def device_map(self) -> dict[str, str | int]:
        """Module to device, as accelerate and transformers take it, in the names that were asked for.

        A new dict each time, which may be changed without changing the plan.

        CUDA devices are numbers: of names, `dispatch_model` takes any one to run offloaded modules on, and not always
        the same (accelerate 1.15).
        """
        named = self.homes if self.renamed is None else self.renamed
        return {module: _as_peers_say(device) for module, device in named.items()}

    def device_of(self, tensor_name: str) -> Device:
        """Return the device of a tensor.

        Raises:
            InvalidPlanError: no key of the device map covers it.
        """
        name = tensor_name
        while (device := self.homes.get(name)) is None:
            name, dot, _ = name.rpartition(".")
            if not dot:
                raise InvalidPlanError(f"the device map gives no device to tensor {tensor_name!r}")
        return device

    def leaves_out(self, tensor_name: str) -> bool:
        """Return whether a tensor belongs to a module that gets no device."""
        return bool(self.left_out) and f"{tensor_name}.".startswith(self._left_out_prefixes)

    @cached_property
    def _left_out_prefixes(self) -> tuple[str, ...]:
        return tuple(f"{name}." for name in self.left_out)

    def weights_on(self, device: Device) -> int:
        """Return the bytes of weights that live on `device`."""
        return sum(use.weights_bytes for use in self.devices if use.device == device)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights that have a device, as they are loaded."""
        return sum(use.weights_bytes for use in self.devices)

    @property
    def streamed_bytes(self) -> Mapping[Device, int]:
        """Bytes of weights that are brought to the execution device, by where they come from."""
        sources = (DISK,) if self.execution_device == CPU else (CPU, DISK)
        return {source: self.weights_on(source) for source in sources if self.weights_on(source)}

    @property
    def token_seconds(self) -> float:
        """Seconds in which the bytes that one token needs arrive, at the bandwidths of the options."""
        speeds = {CPU: self.options.bandwidth.link, DISK: self.options.bandwidth.disk}
        return sum(self.token_bytes.get(source, 0) / speeds[source] for source in self.streamed_bytes)

    @property
    def used_devices(self) -> tuple[DeviceUse, ...]:
        """The rows worth showing: all but a disk without a limit that holds nothing."""
        return tuple(use for use in self.devices if use.budget_bytes is not None or use.weights_bytes)

    @property
    def table_unit(self) -> tuple[str, int]:
        """Name and bytes of the unit in which this plan's figures read best."""
        return common_unit(use.budget_bytes or use.weights_bytes for use in self.used_devices)

    @property
    def table_terms(self) -> tuple[str, ...]:
        """What the table shows of the equation: weights and workspace always, caches and `run_bytes` where any are."""
        terms = ("weights", "kv", "run", "workspace")
        always = ("weights", "workspace")
        return tuple(
            term for term in terms if term in always or any(getattr(use, f"{term}_bytes") for use in self.devices)
        )

    def table_figures(self, use: DeviceUse) -> tuple[str, ...]:
        """Return budget, `table_terms` and free of a row in `table_unit`; a dash for none."""
        name, factor = self.table_unit
        digits = 0 if name == "B" else 2
        terms = [getattr(use, f"{term}_bytes") or None for term in self.table_terms]
        sizes = (use.budget_bytes, *terms, use.free_bytes)
        return tuple("-" if size is None else f"{size / factor:.{digits}f}" for size in sizes)

    def __str__(self) -> str:
        """Return the table that `bigload plan` prints."""
        from bigload.planning.plan_text import text_of  # it reads plans

        return text_of(self)


def _as_peers_say(device: Device) -> str | int:
    return device.index if device.kind == "cuda" and device.index is not None else str(device)


def recount(plan: Plan, tensors: Iterable[TensorInfo]) -> dict[Device, int]:
    """Return the bytes of `tensors` per device under `plan`'s device map, counted one by one as they are loaded.

    Raises:
        InvalidPlanError: a tensor has no device, or one on a device that the plan does not list.
    """
    totals = {use.device: 0 for use in plan.devices}
    shared = frozenset(plan.shared)
    sums: dict[str, int] = {}  # by key of the device map, or by module: a giant has fewer of those than tensors
    keys = dict(plan.homes)
    for tensor in as_loaded(tensors, plan.options.workload.load_dtype):
        holder = tensor.name if tensor.name in keys else tensor.name.rpartition(".")[0] or tensor.name
        sums[holder] = sums.get(holder, 0) + (0 if tensor.name in shared else tensor.num_bytes)
    homes: dict[str, Device | None] = {**plan.homes, **dict.fromkeys(plan.left_out)}
    for holder, num_bytes in sums.items():
        device = _home(holder, homes)
        if device is None:
            continue
        if device not in totals:
            raise InvalidPlanError(f"the tensors of {holder!r} are mapped to {device}, which the plan does not list")
        totals[device] += num_bytes
    return totals


def _home(name: str, homes: dict[str, Device | None]) -> Device | None:
    """Return the device of the longest key above `name`, `None` for what is left out; `homes` learns the answer."""
    asked, below = name, []
    while name not in homes:
        below.append(name)
        name, dot, _ = name.rpartition(".")
        if not dot:
            raise InvalidPlanError(f"the device map gives no device to {asked!r}")
    homes.update(dict.fromkeys(below, homes[name]))
    return homes[name]


def summarize(modules: Sequence[str]) -> str:
    """Return module names the short way, runs of blocks folded.

    >>> summarize(["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "lm_head"])
    'embed_tokens, layers 0-2, lm_head'
    >>> summarize(["layers.0.mlp.experts", "layers.1.mlp.experts", "layers.2.attn", "layers.2.norm"])
    'layers 0-1 mlp.experts, layers 2 (2 parts)'
    """
    runs: list[_ModuleRange] = []
    for list_name, number, parts in _gathered(modules):
        last = runs[-1] if runs else None
        if number is None or last is None or (last.name, last.parts, last.stop) != (list_name, parts, number):
            runs.append(_ModuleRange(list_name, parts, number, number))
        if number is not None:
            runs[-1].stop = number + 1
    return ", ".join(map(str, runs))


@dataclass(slots=True)
class _ModuleRange:
    """Blocks that follow each other, whole or the same parts of each; without numbers, any other module."""

    name: str
    parts: tuple[str, ...]
    start: int | None
    stop: int | None

    def __str__(self) -> str:
        words = [self.name.removeprefix("model.").removeprefix("transformer.")]
        if self.start is not None and self.stop is not None:
            words.append(f"{self.start}" if self.stop - self.start == 1 else f"{self.start}-{self.stop - 1}")
        if self.parts != ("",):
            words.append(self.parts[0] if len(self.parts) == 1 else f"({len(self.parts)} parts)")
        return " ".join(words)


def _gathered(modules: Sequence[str]) -> Iterator[tuple[str, int | None, tuple[str, ...]]]:
    """Yield list, number and parts of each block that `modules` name, `("",)` for a whole one."""
    for (name, number), members in groupby(map(_block_of, modules), key=lambda found: found[:2]):
        parts = tuple(part for _, _, part in members)
        if number is None:
            yield from ((name, None, ("",)) for _ in parts)
        else:
            yield name, number, parts


def _block_of(module: str) -> tuple[str, int | None, str]:
    """Return the list, the number and the rest of a name: `layers`, 3, `mlp.gate`."""
    words = module.split(".")
    for place, word in enumerate(words[1:], start=1):
        if is_index(word):
            return ".".join(words[:place]), int(word), ".".join(words[place + 1 :])
    return module, None, ""
