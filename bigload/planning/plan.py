"""The plan: which device holds which module, and what that costs each device.

A plan is data. It names modules, devices and bytes, it can be checked against the checkpoint it was made for, and the
same inputs give the same plan to the last byte of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

from bigload.checkpoint.model import NameRanges, TensorInfo, name_of, ranges_of, sizes_of
from bigload.checkpoint.records.fingerprint import ShardFingerprint
from bigload.devices import CPU, DISK, Device
from bigload.errors import InvalidPlanError
from bigload.plain_text import PlainTable, Styled, printable, stacked_bar
from bigload.planning.load_dtype import as_loaded
from bigload.planning.model.module_tree import key_above
from bigload.planning.module_table import folded_names
from bigload.planning.options import PlanOptions, plan_keywords
from bigload.planning.placement.optimality import Certificate
from bigload.planning.workload import Workload
from bigload.units import common_unit, counted, format_size

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Row of a plan, an equation of bytes: the budget is the sum of all that follows, and what is free.

    Attributes:
        budget_bytes: Limit of the device, `None` for a disk without one.
        weights_bytes: Weights that live there.
        padding_bytes: Rows with which engines make divided vocabularies even.
        kv_bytes: Caches and recurrent states of the blocks that run there.
        logits_bytes: What the head returns, if it runs there.
        activation_bytes: One buffer for what blocks compute.
        overhead_bytes: What the device takes besides: context, kernels, slack.
        workspace_bytes: Room for streamed weights, and for experts that stay on the execution device.
    """

    budget_bytes: int | None
    weights_bytes: int
    padding_bytes: int = 0
    kv_bytes: int = 0
    logits_bytes: int = 0
    activation_bytes: int = 0
    overhead_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def run_bytes(self) -> int:
        """Bytes that running takes beside weights and caches."""
        return self.padding_bytes + self.logits_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def used_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.run_bytes + self.workspace_bytes

    @property
    def free_bytes(self) -> int | None:
        return None if self.budget_bytes is None else self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse(MemoryUse):
    """Memory of one device. `modules` are keys of the device map, in execution order."""

    device: Device
    modules: tuple[str, ...]


TERMS = ("weights", "kv", "logits", "activation", "overhead", "workspace")
"""What takes memory on a device, in the order in which equations show it."""

BOUNDS = ("offloaded_bytes", "least_offloaded_bytes", "disk_bytes", "least_disk_bytes", "largest_bytes")
RESIDENT_COUNTS = ("num_bytes", "num_uses", "num_recorded")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanNote:
    """Something worth knowing about a plan: a stable `code` and one sentence."""

    code: str
    text: str


class ResidentExperts(NamedTuple):
    """Routed experts of blocks that are elsewhere, which stay on the execution device because they are used most.

    Attributes:
        experts: Their numbers, by the module that holds them in the model that runs.
        num_bytes: Room for them, a part of the workspace of the execution device.
        num_uses: How often a recorded run used them.
        num_recorded: How often it used any expert of blocks that are elsewhere.
    """

    experts: Mapping[str, tuple[int, ...]]
    num_bytes: int
    num_uses: int
    num_recorded: int
    stats_sha256: str

    @property
    def num_experts(self) -> int:
        return sum(map(len, self.experts.values()))

    def __str__(self) -> str:
        share = self.num_uses / (self.num_recorded or 1)
        used = counted(self.num_experts, "most used expert")
        return f"{used}, {format_size(self.num_bytes)}, with {share:.0%} of recorded uses"


@dataclass(frozen=True, kw_only=True)
class PlannedCheckpoint:
    """Checkpoint of a plan, for one machine or for ranks.

    Attributes:
        checkpoint_path: The checkpoint as the user named it.
        total_bytes: Bytes of all its tensors, as stored.
        shards: Its fingerprint; a plan is void for a checkpoint with another.
        options: What was asked for beside the budget.
        left_out: Modules that no device holds, because no ordinary forward pass runs them.
        notes: Whatever else there is to know.
        kind: What the file is called in errors.
    """

    schema: ClassVar[str]
    kind: ClassVar[str]

    checkpoint_path: str
    total_bytes: int
    shards: tuple[ShardFingerprint, ...]
    options: PlanOptions
    left_out: tuple[str, ...] = ()
    notes: tuple[PlanNote, ...] = ()

    @property
    def name(self) -> str:
        """Name of the checkpoint in tables and messages."""
        return name_of(self.checkpoint_path) or Path(self.checkpoint_path).resolve().name

    def shown(self, *, blocks: bool, times: str | None = None) -> Iterator[str | PlainTable]:
        """Yield the lines and the table that `bigload plan` prints, with bars of block characters or of ASCII.

        `times` is a sentence on how long the plan takes on a machine that is known.
        """
        raise NotImplementedError

    def document(self) -> dict[str, object]:
        """Return what a plan file holds, as plain JSON values."""
        raise NotImplementedError

    def _about_checkpoint(self) -> dict[str, object]:
        shards = [{**shard.to_json(), "etag": shard.etag} for shard in self.shards]
        return {"path": self.checkpoint_path, "total_bytes": self.total_bytes, "shards": shards}

    def _named_notes(self) -> list[dict[str, str]]:
        return [{"code": note.code, "text": note.text} for note in self.notes]

    def __str__(self) -> str:
        """Return what `bigload plan` prints."""
        pieces = (piece if isinstance(piece, str) else piece.as_text() for piece in self.shown(blocks=True))
        return "\n".join(piece.removesuffix("\n") for piece in pieces)


@dataclass(frozen=True, kw_only=True)
class Plan(PlannedCheckpoint):
    """Device of every tensor of a checkpoint.

    Attributes:
        execution_device: Where modules on `cpu` and `disk` run, except that RAM runs its own when this is `cpu`.
        homes: Module, by its name in the checkpoint, to device: every tensor is below exactly one key, unless it is
            left out.
        devices: One row per device of the budget, in its order.
        certificate: How far from the best the plan is at most.
        num_device_changes: How often a forward pass moves on to another device.
        token_bytes: Weights that one token needs from RAM and from disk, for routed experts those chosen; less what
            is expected to hit `resident_experts`.
        shared: Stored tensors that take no memory, because they are copies of others.
        renamed: Names that `options.names` asks for to device, `None` where they are those of the checkpoint.
        resident_experts: Experts that stay on the execution device; `None` without recorded uses, or room for one.
        notes: Whatever else there is to know.
    """

    schema = "bigload.plan/1.2"
    kind = "plan file"

    execution_device: Device
    homes: Mapping[str, Device]
    devices: tuple[DeviceUse, ...]
    certificate: Certificate
    num_device_changes: int
    token_bytes: Mapping[Device, int]
    shared: tuple[str, ...] = ()
    renamed: Mapping[str, Device] | None = None
    resident_experts: ResidentExperts | None = None

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
        key = key_above(tensor_name, self.homes)
        if key is None:
            raise InvalidPlanError(f"the device map gives no device to tensor {tensor_name!r}")
        return self.homes[key]

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
        """Bytes of weights, with adapters, that are brought to the execution device, by where they come from."""
        sources = (DISK,) if self.execution_device == CPU else (CPU, DISK)
        # overhead where nothing runs is of adapters, which are brought with the weights that they change
        uses = (use for use in self.devices if use.device in sources and use.weights_bytes)
        return {use.device: use.weights_bytes + use.overhead_bytes for use in uses}

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

    def shown(self, *, blocks: bool, times: str | None = None) -> Iterator[str | PlainTable]:
        yield headline(self)
        yield from ("", device_table(self, blocks=blocks), "")
        yield from closing_lines(self, times)

    def document(self) -> dict[str, object]:
        return {
            "schema": self.schema,
            "checkpoint": self._about_checkpoint(),
            "policy": str(self.policy),
            "options": plan_keywords(self.options),
            "execution_device": str(self.execution_device),
            "device_map": _named(self.homes),
            "renamed_device_map": None if self.renamed is None else _named(self.renamed),
            "left_out": list(self.left_out),
            "shared": list(self.shared),
            "devices": [
                {
                    "device": str(use.device),
                    "budget_bytes": use.budget_bytes,
                    **{f"{term}_bytes": getattr(use, f"{term}_bytes") for term in TERMS},
                    "free_bytes": use.free_bytes,
                }
                for use in self.devices
            ],
            "num_device_changes": self.num_device_changes,
            "resident_experts": _resident_document(self.resident_experts),
            "token_bytes": {str(device): num_bytes for device, num_bytes in self.token_bytes.items()},
            "certificate": {
                "verdict": str(self.certificate.verdict),
                **{name: getattr(self.certificate, name) for name in BOUNDS},
                "within_blocks": self.certificate.within_blocks,
            },
            "notes": self._named_notes(),
            "prediction": None,  # a file says nothing about machines: the same inputs give the same bytes
        }


def _named(homes: Mapping[str, Device]) -> dict[str, str]:
    return {module: str(device) for module, device in homes.items()}


def _resident_document(resident: ResidentExperts | None) -> dict[str, object]:
    if resident is None:
        return {**dict.fromkeys(RESIDENT_COUNTS, 0), "stats_sha256": None, "experts": {}}
    experts = {module: list(numbers) for module, numbers in resident.experts.items()}
    counts = {name: getattr(resident, name) for name in RESIDENT_COUNTS}
    return {**counts, "stats_sha256": resident.stats_sha256, "experts": experts}


def _as_peers_say(device: Device) -> str | int:
    return device.index if device.kind == "cuda" and device.index is not None else str(device)


def recount(plan: Plan, tensors: Mapping[str, TensorInfo]) -> dict[Device, int]:
    """Return the bytes of `tensors` per device under `plan`'s device map, counted as they are loaded."""
    totals = {use.device: 0 for use in plan.devices}
    shared = frozenset(plan.shared)
    homes: dict[str, Device | None] = {**plan.homes, **dict.fromkeys(plan.left_out)}
    loaded = as_loaded(tensors, plan.options.workload.load_dtype)
    sizes = sizes_of(loaded)
    if shared:
        sizes = {**sizes, **dict.fromkeys(shared & sizes.keys(), 0)}
    ranges, num_covered = NameRanges(sizes) if shared else ranges_of(loaded), 0
    for key, device in homes.items():
        start, stop = ranges.of(key)
        num_bytes = ranges.num_bytes(start, stop) + sizes.get(key, 0)
        num_tensors = stop - start + (key in sizes)
        outer = key_above(key.rpartition(".")[0], homes) if "." in key else None
        if outer is None:
            num_covered += num_tensors
        elif (around := homes[outer]) in totals:
            totals[around] -= num_bytes
        if device is not None and num_tensors:
            if device not in totals:
                raise InvalidPlanError(f"{key!r} is mapped to {device}, which the plan does not list")
            totals[device] += num_bytes
    if num_covered < len(sizes):
        asked = next(name for name in sizes if key_above(name, homes) is None)
        raise InvalidPlanError(f"the device map gives no device to tensor {asked!r}")
    return totals


def headline(plan: Plan) -> str:
    """Return where the weights are, in one line, and how the figures of the table read, in another."""
    unit, _ = plan.table_unit
    return f"{printable(plan.name)} fits: {whereabouts(plan)}\n{subject(plan)}, figures in {unit}"


def whereabouts(plan: Plan) -> str:
    """Return the shares of the weights by where they are: `41% on GPUs, 59% in RAM`."""
    accelerators = [use.device for use in plan.devices if use.device.is_accelerator]
    noun = "GPU" if {device.kind for device in accelerators} <= {"cuda", "xpu", "mps"} else "accelerator"
    on_accelerators = f"on the {noun}" if len(accelerators) == 1 else f"on {noun}s"
    shares: dict[str, int] = {}
    for use in plan.devices:
        place = {CPU: "in RAM", DISK: "on disk"}.get(use.device, on_accelerators)
        shares[place] = shares.get(place, 0) + use.weights_bytes
    total = plan.weights_bytes or 1
    return ", ".join(f"{size / total:.0%} {place}" for place, size in shares.items() if size) or "it is empty"


def subject(plan: Plan) -> str:
    """Return what was planned: how large, for what, by which policy."""
    workload = plan.options.workload
    if plan.options.quantize:
        text = f"{format_size(plan.weights_bytes)} as {plan.options.quantize}"
    elif workload.load_dtype is not None:
        text = f"{format_size(plan.weights_bytes)} as {workload.load_dtype}"
    else:
        text = f"{format_size(plan.total_bytes)} as stored"
    return f"{text}{tokens(workload)}, {plan.policy} policy"


def tokens(workload: Workload) -> str:
    """Return how much context a plan is for, as what follows its size: `, 4 sequences of 8,192 tokens`."""
    batch = f"{counted(workload.batch, 'sequence')} of " if workload.batch > 1 else ""
    return f", {batch}{counted(workload.context, 'token')}" if workload.context else ""


def device_table(plan: Plan, *, blocks: bool) -> PlainTable:
    """Return the table: budget = weights + caches + run + workspace + free, for every device."""
    terms = [
        term
        for term in ("weights", "kv", "run", "workspace")
        if term in ("weights", "workspace") or any(getattr(use, f"{term}_bytes") for use in plan.devices)
    ]
    right = ("BUDGET =", *(f"{term.upper()} +" for term in terms), "FREE")
    table = PlainTable(("DEVICE", *right, "USE", "HOLDS"), right=right, folding="HOLDS", droppable="USE")
    for use in plan.used_devices:
        cells = figures(use, terms, plan.table_unit[1])
        table.add(str(use.device), *cells, usage_bar(use, blocks=blocks), folded_names(use.modules))
    return table


def figures(use: MemoryUse, terms: Iterable[str], factor: int) -> tuple[str, ...]:
    """Return the cells of an equation of bytes: budget, `terms` and what is free, `"-"` for what there is none of."""
    sizes = (use.budget_bytes, *(getattr(use, f"{term}_bytes") or None for term in terms), use.free_bytes)
    digits = 0 if factor == 1 else 2
    return tuple("-" if size is None else f"{size / factor:.{digits}f}" for size in sizes)


def running(uses: Iterable[tuple[T, MemoryUse]]) -> dict[str, list[T]]:
    """Return what running takes beside weights and caches, in words, with the places where it takes that."""
    found: dict[str, list[T]] = {}
    for place, use in uses:
        terms = {
            "overhead": use.overhead_bytes,
            "activations": use.activation_bytes,
            "logits": use.logits_bytes,
            "padding of the vocabulary": use.padding_bytes,
        }
        words = " + ".join(f"{format_size(size)} {term}" for term, size in terms.items() if size)
        if words:
            found.setdefault(words, []).append(place)
    return found


def usage_bar(use: MemoryUse, *, blocks: bool) -> Styled:
    """Return a bar of weights, of what else is used, and of what is free."""
    if not use.budget_bytes:
        return Styled("", "cyan")
    full, half, rest = ("█", "▒", "·") if blocks else ("#", "+", ".")
    weights = use.weights_bytes / use.budget_bytes
    beside = (use.used_bytes - use.weights_bytes) / use.budget_bytes
    return Styled(stacked_bar([(weights, full), (beside, half), (1 - weights - beside, rest)], width=16), "cyan")


def closing_lines(plan: Plan, times: str | None = None) -> list[str]:
    """Return the lines below the table: what running and streaming take, how good the plan is, and notes.

    `times` is a sentence on how long the plan takes on a machine that is known.
    """
    quality = str(plan.certificate)
    if sum(bool(use.modules) for use in plan.devices if use.device.is_accelerator) > 1:
        quality = f"{counted(plan.num_device_changes, 'device change')} per forward pass; {quality}"
    return [
        *(
            f"RUN is {words} on {', '.join(map(str, devices))}."
            for words, devices in running((use.device, use) for use in plan.devices).items()
        ),
        *streaming_lines(plan, times),
        f"{quality[0].upper()}{quality[1:]}.",
        *(f"note: {printable(note.text)}" for note in plan.notes),
    ]


def streaming_lines(plan: Plan, times: str | None = None) -> list[str]:
    """Return sentences on what a token brings from RAM and disk, and `times` instead of what that takes at least.

    None but these when every module runs where it is.
    """
    streamed = plan.streamed_bytes
    if not streamed:
        return [] if times is None else [times]
    origins = {CPU: "from RAM", DISK: "from disk"}
    needed = {device: plan.token_bytes.get(device, 0) for device in streamed}
    is_sparse = sum(needed.values()) < sum(streamed.values())
    shown = needed if is_sparse else streamed
    total = format_size(sum(shown.values()))
    if is_sparse:
        total = f"{total} of {format_size(sum(streamed.values()))}"
    if len(shown) > 1:
        sources = ", ".join(f"{format_size(size)} {origins[device]}" for device, size in shown.items())
        brought = f"{total} to {plan.execution_device}: {sources}"
    else:
        brought = f"{total} {origins[next(iter(shown))]} to {plan.execution_device}"
    speeds = {CPU: plan.options.bandwidth.link, DISK: plan.options.bandwidth.disk}
    rates = " and ".join(f"{format_size(speeds[device])}/s {origins[device]}" for device in shown)
    least = "" if plan.token_seconds < SHORTEST_SECONDS else "at least "
    lines = [
        f"Each {'token' if is_sparse else 'forward pass'} brings {brought}.",
        times or f"At {rates} that is {least}{duration(plan.token_seconds)}.",
    ]
    if any(use.workspace_bytes for use in plan.devices):
        ahead = all(note.code != "no-prefetch" for note in plan.notes)
        held = "two streamed modules: one computes, the next arrives" if ahead else "the largest streamed module"
        lines.append(f"Workspace holds {held}.")
    if plan.resident_experts is not None:
        lines.append(f"It also holds the {plan.resident_experts}.")
    return lines


SHORTEST_SECONDS = 0.001
"""Shorter times are not told apart."""


def duration(seconds: float) -> str:
    """Return a time as a word: `13.7 s`, `180 ms`."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= SHORTEST_SECONDS else "under 1 ms"
