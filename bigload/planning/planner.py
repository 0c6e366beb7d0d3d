"""Make a plan: read the structure of the model, let a policy place it, and say what that costs each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.records.fingerprint import fingerprint
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import CPU, DISK, Device
from bigload.errors import InvalidPlanError
from bigload.planning.advice import does_not_fit
from bigload.planning.budget.budget import MaxMemory, MemoryBudget
from bigload.planning.choices import Experts, NameScheme
from bigload.planning.model.module_tree import key_above
from bigload.planning.model.structure import ModelStructure, read_structure
from bigload.planning.model.units import with_dense_held
from bigload.planning.notes import notes_on, tie_homes
from bigload.planning.options import PlanKeywords, PlanOptions, options_of
from bigload.planning.placement.optimality import Verdict, certify
from bigload.planning.placement.policies.optimal import token_cost
from bigload.planning.placement.problem import (
    Misfit,
    Placement,
    PlacementProblem,
    device_loads,
    fetch_ahead,
    num_device_changes,
)
from bigload.planning.placement.solve import Solution, place_by, solve
from bigload.planning.plan import DeviceUse, Plan, PlanNote, recount
from bigload.planning.policy_registry import policy_named
from bigload.units import format_size

if TYPE_CHECKING:
    from bigload.planning.model.adapters import AdapterBytes


def plan(
    checkpoint: Checkpoint | str | Path,
    max_memory: MemoryBudget | MaxMemory,
    *,
    disk: bool = True,
    **keywords: Unpack[PlanKeywords],
) -> Plan:
    """Assign every module of `checkpoint` to one device of `max_memory`.

    `max_memory` maps devices to sizes, `{"cuda:0": "22GiB", "cpu": "64GiB"}`, or is `"auto"`. What finds no room goes
    to disk, unless `disk=False` (`--no-disk`) or a limit of 0 forbids that. Other keywords are those of the command
    line, with the same defaults: `policy`, `context`, `batch`, `dtype`, `kv_dtype`, `attention`, `overhead`, `balance`,
    `order`, `experts`, `prefetch`, `no_split`, `mtp`, `names`, `disk_bandwidth`, `link_bandwidth`, `expert_stats`,
    `lora` (`PlanOptions` says what they mean).

    Raises:
        DoesNotFitError: the policy found no placement that keeps every limit; the error says what is short where.
        OptionError: `max_memory` names an unknown device or a size that cannot be read.
        OptionError: a keyword has a value that cannot be, or contradicts another.
        NamesUnknownError: the names asked for are not known.
        AdapterError: a folder of `lora` is no LoRA adapter, or one for another base.
        CheckpointError: the checkpoint cannot be opened.
    """
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    budget = max_memory if isinstance(max_memory, MemoryBudget) else MemoryBudget.of(max_memory, use_disk=disk)
    return plan_details(opened, budget if disk else budget.without_disk(), options_of(**keywords)).plan


class PlanDetails(NamedTuple):
    """A plan with what it was made of, for questions about it."""

    structure: ModelStructure
    budget: MemoryBudget
    options: PlanOptions
    solution: Solution
    plan: Plan


def plan_details(checkpoint: Checkpoint, budget: MemoryBudget, options: PlanOptions) -> PlanDetails:
    """Make a plan and keep what it was made of."""
    structure = read_structure(checkpoint, options)
    solution = place(structure, budget, options)
    if isinstance(solution, Misfit):
        raise does_not_fit(checkpoint.name, problem_of(structure, budget, options), solution, options.policy)
    made = _plan(structure, budget, options, solution)
    _audit(made, structure.checkpoint)
    return PlanDetails(structure=structure, budget=budget, options=options, solution=solution, plan=made)


def problem_of(
    structure: ModelStructure, budget: MemoryBudget, options: PlanOptions, *, split_experts: bool = False
) -> PlacementProblem:
    """Return the question that a policy is asked."""
    activation = structure.run_memory(options.workload).activation_bytes
    units = structure.units(options.workload, split_experts=split_experts)
    return PlacementProblem(
        units=units,
        budget=budget,
        fixed_bytes={device: activation + options.overhead_of(device) for device, _ in budget if device != DISK},
        num_in_flight=2 if options.prefetch else 1,
        bandwidth=options.bandwidth,
        balance=options.balance,
        any_order=options.any_order,
        visits=structure.visits(units),
    )


def place(structure: ModelStructure, budget: MemoryBudget, options: PlanOptions) -> Solution | Misfit:
    """Place a model, with its experts apart from their blocks where that is asked for or streams less per token."""
    plain = _place(structure, budget, options)
    if options.expert_stats is None:
        return plain
    from bigload.planning.resident_experts import best_by_uses, checked_layers  # few plans need it

    layers = checked_layers(structure, options.expert_stats)
    problem = problem_of(structure, budget, options, split_experts=True)
    return best_by_uses(plain if isinstance(plain, Solution) else None, problem, layers, options.expert_stats) or plain


def _place(structure: ModelStructure, budget: MemoryBudget, options: PlanOptions) -> Solution | Misfit:
    if options.experts is Experts.SPLIT and structure.experts:
        return _dense_first(structure, budget, options)
    best = solve(problem_of(structure, budget, options), options.policy)
    if True not in expert_forms(structure, options) or (
        isinstance(best, Solution) and _cost(best, budget) == (False, 0)
    ):
        return best
    apart = solve(problem_of(structure, budget, options, split_experts=True), options.policy)
    if isinstance(apart, Solution) and (isinstance(best, Misfit) or _cost(apart, budget) < _cost(best, budget)):
        return apart
    return best


def expert_forms(structure: ModelStructure, options: PlanOptions) -> Iterator[bool]:
    """Yield whether experts may be placed apart from their blocks: no, yes, or both."""
    if options.experts is not Experts.SPLIT or not structure.experts:
        yield False
    if structure.experts and policy_named(options.policy).splits_experts and options.experts is not Experts.BLOCK:
        yield True


def _dense_first(structure: ModelStructure, budget: MemoryBudget, options: PlanOptions) -> Solution | Misfit:
    """Place all but routed experts on accelerators if they hold it, where it costs least if they do not."""
    problem = problem_of(structure, budget, options, split_experts=True)
    if budget.accelerators:
        held = place_by(options.policy, replace(problem, units=with_dense_held(problem.units)))
        if isinstance(held, Placement):
            return Solution(problem=problem, placement=fetch_ahead(problem, held))
    return solve(problem, options.policy)


def _cost(solution: Solution, budget: MemoryBudget) -> tuple[bool, int]:
    """Return whether accelerators stay unused, and what a token costs, in the unit of `memory_tiers.Host`."""
    problem, placement = solution.problem, solution.placement
    return placement.execution_device == CPU and bool(budget.accelerators), token_cost(problem, placement)


def _plan(structure: ModelStructure, budget: MemoryBudget, options: PlanOptions, solution: Solution) -> Plan:
    placement = solution.placement
    homes = {
        part.name: runs_on if part.is_held else device
        for unit, device, runs_on in zip(solution.problem.units, placement.devices, placement.running, strict=True)
        for part in unit.parts
    }
    token_bytes: dict[Device, int] = {}
    units, resident, certificate = solution.problem.units, None, certify(solution.problem, placement)
    if options.expert_stats is not None:
        from bigload.planning.resident_experts import checked_layers, expected_units, resident_experts

        layers = checked_layers(structure, options.expert_stats)
        resident = resident_experts(solution, layers, options.expert_stats)
        units = expected_units(solution, layers, options.expert_stats)
        if token_cost(solution.problem, placement):  # what is proven is not proven of recorded uses
            certificate = replace(certificate, verdict=Verdict.BOUNDED)
    for unit, device in zip(units, placement.devices, strict=True):
        if not device.is_accelerator:
            token_bytes[device] = token_bytes.get(device, 0) + unit.token_bytes
    homes |= tie_homes(structure.ties, homes)
    homes = {name: homes[name] for name in structure.in_execution_order(homes)}
    devices = tuple(_device_uses(budget, options, solution, homes, 0 if resident is None else resident.num_bytes))
    adapters = [_by_device(adapter, homes) for adapter in structure.adapters]
    devices = tuple(_with_adapters(use, adapters) for use in devices)
    notes = list(notes_on(structure, budget, options, solution, devices))
    for adapter, by_device in zip(structure.adapters, adapters, strict=True):
        places = ", ".join(f"{format_size(size)} on {device}" for device, size in by_device.items())
        text = f"adapter {adapter.name}: {places}, beside the modules that it changes; counted as overhead"
        notes.append(PlanNote(code="adapter", text=text))
    renamed = None
    if options.names is not NameScheme.CHECKPOINT:
        from bigload.planning.module_names import in_memory_names, rename_device_map  # imports what few plans need

        renaming = in_memory_names(tuple(homes), structure.checkpoint.tensors, structure.checkpoint.config)
        renamed = rename_device_map(homes, renaming)
        notes += [PlanNote(code="names", text=text) for text in renaming.notes]
    return Plan(
        checkpoint_path=structure.checkpoint.path,
        total_bytes=structure.checkpoint.total_bytes,
        shards=fingerprint(structure.checkpoint),
        options=replace(options, expert_stats=None, lora=()),
        execution_device=placement.execution_device,
        homes=homes,
        devices=devices,
        certificate=certificate,
        num_device_changes=num_device_changes(solution.problem, placement),
        token_bytes=token_bytes,
        left_out=structure.left_out,
        shared=structure.shared,
        renamed=renamed,
        resident_experts=resident,
        notes=tuple(notes),
    )


def _device_uses(
    budget: MemoryBudget, options: PlanOptions, solution: Solution, homes: Mapping[str, Device], resident_bytes: int
) -> Iterator[DeviceUse]:
    loads = device_loads(solution.problem, solution.placement)
    extra = {solution.placement.execution_device: resident_bytes}
    for device, limit in budget:
        load = loads.get(device)
        overhead = options.overhead_of(device) if load is not None and load.fixed else 0
        yield DeviceUse(
            device=device,
            budget_bytes=limit,
            weights_bytes=load.weights if load else 0,
            kv_bytes=load.cache if load else 0,
            logits_bytes=load.logits if load else 0,
            activation_bytes=load.fixed - overhead if load else 0,
            overhead_bytes=overhead,
            workspace_bytes=load.workspace + extra.get(device, 0) if load else 0,
            modules=tuple(module for module, home in homes.items() if home == device),
        )


def _by_device(adapter: AdapterBytes, homes: Mapping[str, Device]) -> dict[Device, int]:
    """Return the bytes of an adapter by device, in the order of the device map."""
    by_device: dict[Device, int] = {}
    for name, num_bytes in adapter.by_tensor.items():
        if (key := key_above(name, homes)) is not None:  # modules that are left out have no device
            by_device[homes[key]] = by_device.get(homes[key], 0) + num_bytes
    return by_device


def _with_adapters(use: DeviceUse, adapters: Iterable[Mapping[Device, int]]) -> DeviceUse:
    """Return a row whose weights are those of the checkpoint, as plan files are checked; adapters are overhead."""
    beside = sum(by_device.get(use.device, 0) for by_device in adapters)
    return replace(use, weights_bytes=use.weights_bytes - beside, overhead_bytes=use.overhead_bytes + beside)


def _audit(made: Plan, checkpoint: Checkpoint) -> None:
    """Count the finished plan from its device map and rows alone, before anyone sees it."""
    counted = recount(made, checkpoint.tensors)
    for use in made.devices:
        if counted[use.device] != use.weights_bytes or (use.free_bytes is not None and use.free_bytes < 0):
            raise InvalidPlanError(
                f"the plan for {made.name} does not add up on {use.device}: {counted[use.device]} bytes by its device "
                f"map, {use.weights_bytes} by its row, {use.free_bytes} free",
                hint="this is a bug in bigload; please report it with the output of: bigload inspect --json",
            )
