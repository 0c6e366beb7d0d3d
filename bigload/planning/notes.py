"""Notes on a plan beside its figures, one sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bigload.checkpoint.pipeline import has_modules
from bigload.checkpoint.quantisation import quantisation_of
from bigload.devices import CPU, DISK, Device
from bigload.planning.advice import ram_without_disk
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import NameScheme
from bigload.planning.model.module_tree import key_above
from bigload.planning.model.structure import ModelStructure
from bigload.planning.model.ties import TiedGroup
from bigload.planning.options import PlanOptions
from bigload.planning.placement.solve import Solution
from bigload.planning.plan import DeviceUse, PlanNote
from bigload.planning.policy_registry import policy_named
from bigload.units import counted, format_size


def notes_on(
    structure: ModelStructure,
    budget: MemoryBudget,
    options: PlanOptions,
    solution: Solution,
    devices: Sequence[DeviceUse],
) -> Iterator[PlanNote]:
    """Yield the notes on a plan that was made."""
    if options.quantize:
        command = f"bigload reshard --quantize {options.quantize}"
        text = f"what if: {command} writes such weights, and a plan of that folder can be carried out"
        yield PlanNote(code="what-if", text=text)
    if budget.detection is not None:
        yield PlanNote(code="detected", text=budget.detection)
    for text in budget.notes:
        yield PlanNote(code="detected", text=text)
    yield from _on_execution(budget, solution)
    if DISK in solution.placement.devices and (ram := ram_without_disk(solution, options.policy)) is not None:
        yield PlanNote(code="disk-used", text=f"with {ram} nothing would stay on disk")
    if any(use.workspace_bytes for use in devices) and solution.placement.num_in_flight == 1:
        is_final = options.prefetch or policy_named(options.policy).streams_all  # --offload decides how many
        text = "there is room for one streamed module at a time, so none can arrive while another computes"
        yield PlanNote(code="no-prefetch", text=text if is_final else f"{text} (--prefetch keeps room for two)")
    yield from _on_empty(devices, solution.placement.execution_device)
    yield from _on_structure(structure, options)
    yield from _on_experts(structure, options, solution)
    for tie in structure.ties:
        yield from _on_tie(tie, devices)


def _on_execution(budget: MemoryBudget, solution: Solution) -> Iterator[PlanNote]:
    if budget.accelerators and not solution.problem.budget.accelerators:
        yield PlanNote(
            code="runs-on-cpu",
            text="no accelerator can hold what would be streamed through it, so the cpu runs the model",
        )
    execution, used = solution.placement.execution_device, set(solution.placement.devices)
    numbered = [device for device in used if device.kind == execution.kind and device.index is not None]
    first = min(numbered, key=lambda device: device.index or 0, default=execution)
    if first != execution and used & {CPU, DISK}:
        yield PlanNote(
            code="main-device",
            text=f"offloaded modules run on {execution}; accelerate needs to be told: main_device={execution.index}",
        )


def _on_empty(devices: Sequence[DeviceUse], execution: Device) -> Iterator[PlanNote]:
    streams = any(use.weights_bytes for use in devices if not use.device.is_accelerator)
    for use in devices:
        if use.device.is_accelerator and not use.weights_bytes:
            spare = "it only runs what is streamed to it" if streams and use.device == execution else "it is not used"
            yield PlanNote(code="device-empty", text=f"{use.device} holds no weights; {spare}")


def _on_structure(structure: ModelStructure, options: PlanOptions) -> Iterator[PlanNote]:
    if structure.extra_layers:
        names = ", ".join(structure.extra_layers)
        size = format_size(structure.left_out_bytes)
        held = f"{names} ({counted(len(structure.extra_layers), 'module')}, {size})"
        text = f"no device holds layers that only predict further tokens: {held}; --mtp places them too"
        yield PlanNote(code="left-out", text=text)
    quantised = quantisation_of(structure.checkpoint)
    if quantised is not None:
        text = f"weights are quantised, {quantised}: counted as they are stored, without room to unpack them"
        yield PlanNote(code="quantised", text=text)
    if structure.checkpoint.components and not has_modules(structure.checkpoint):
        text = "weights of all components are counted; latents, activations and text caches of a pipeline are not"
        yield PlanNote(code="unknown", text=text)
    elif structure.checkpoint.config is None:
        text = (
            "no config.json could be read: whether a head shares the embedding and how experts are chosen is not known"
        )
        yield PlanNote(code="unknown", text=text)
    for text in structure.run_memory(options.workload).unknown:
        yield PlanNote(code="unknown", text=text)
    if options.workload.context:
        for code, text in structure.memory.assumptions(options.workload):
            yield PlanNote(code=code, text=text)


def _on_experts(structure: ModelStructure, options: PlanOptions, solution: Solution) -> Iterator[PlanNote]:
    """Say which experts a token is assumed to stream, where the runtimes that carry out a plan differ."""
    riding = [unit for unit in solution.problem.units if unit.is_routed]
    streamed = any(unit.stream_bytes < unit.num_bytes for unit in riding)
    if streamed and options.names is NameScheme.CHECKPOINT:
        whole = format_size(max(unit.num_bytes for unit in riding))
        yield PlanNote(
            code="experts-apart",
            text=f"only the experts that a token chooses are streamed; transformers streams all of a block, {whole}: "
            "plan for it with --names transformers",
        )
    placed = zip(solution.problem.units, solution.placement.devices, strict=True)
    stored = (unit for unit, device in placed if not device.is_accelerator)
    has_experts = any(unit.is_routed or part.name in structure.experts for unit in stored for part in unit.parts)
    if options.names is NameScheme.TRANSFORMERS and has_experts:
        yield PlanNote(
            code="experts-fused",
            text="a token is counted to stream all experts of a block, as transformers and accelerate do; with --names "
            "checkpoint, only the experts that it chooses, as bigload streams them",
        )


def _on_tie(tie: TiedGroup, devices: Sequence[DeviceUse]) -> Iterator[PlanNote]:
    keys = {module for use in devices for module in use.modules}
    first, *stored = dict.fromkeys(key for name in tie.stored if (key := key_above(name, keys)) is not None)
    others = ", ".join([*stored, *(f"{module} (not stored)" for module in tie.absent_modules)])
    if others:
        compared = "; large tensors were compared by samples" if tie.is_sampled else ""
        yield PlanNote(code="tied", text=f"tied to {first}, so on one device with it: {others}{compared}")
    for name in tie.differing:
        text = f"the config ties {name} to {tie.stored[0]}, but their bytes differ: both are counted"
        yield PlanNote(code="not-tied", text=text)


def tie_homes(ties: Sequence[TiedGroup], homes: Mapping[str, Device]) -> dict[str, Device]:
    """Return the devices of modules that are not stored, because they share the weights of one that is."""
    added: dict[str, Device] = {}
    for tie in ties:
        if (key := key_above(tie.stored[0], homes)) is not None:
            added |= {module: homes[key] for module in tie.absent_modules if key_above(module, homes) is None}
    return added
