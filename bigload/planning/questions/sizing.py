"""Sizing: the least memory per GPU for a number of equal GPUs, and the number of GPUs of one size.

Without offload every GPU runs one stretch of the model, and GPUs are filled in execution order. For equal GPUs filling
each as far as it goes is the best there is, so the least size is found by halving over bytes, exactly. All policies
agree here: they differ in what they do with memory that is left over.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bigload.devices import CPU, Device
from bigload.errors import OptionError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Balance, Policy
from bigload.planning.model.structure import ModelStructure
from bigload.planning.model.units import Unit
from bigload.planning.options import PlanOptions
from bigload.planning.placement.policies.optimal import token_seconds
from bigload.planning.placement.problem import Placement, PlacementProblem
from bigload.planning.placement.solve import place_by
from bigload.planning.planner import expert_forms, problem_of
from bigload.planning.policy_registry import policy_named
from bigload.units import MAX_SIZE, common_unit, format_rounded_up, format_size

COUNTS = (1, 2, 4, 8)
"""Numbers of GPUs that machines come with."""

MAX_GPUS = 4096
"""More are a slip of the keyboard."""

_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestUnit:
    """Lower bound of a device's size: the largest module that stays whole, with all that it needs.

    `num_bytes` is of its weights, `run_bytes` of its cache and logits.
    """

    name: str
    num_bytes: int
    run_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The least size of `num_gpus` equal GPUs; `None` where it is beyond any device."""

    num_gpus: int
    gpu_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EveryGpu:
    """Lower bound of every GPU's size, however many there are.

    Attributes:
        fixed_bytes: Of every GPU that is used: overhead and activations, which all sizes include.
        largest: The largest unit, `None` for an empty model.
        unknown: Sentences on what is not counted because neither names nor config tell.
    """

    fixed_bytes: int
    largest: LargestUnit | None
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSizes(EveryGpu):
    """Sizes of equal GPUs that offload nothing: one answer per number of GPUs, as they were asked for."""

    least: tuple[LeastMemory, ...]

    def __str__(self) -> str:
        sizes = [least.gpu_bytes for least in self.least if least.gpu_bytes is not None]
        unit, _ = common_unit(sizes)
        texts: list[str] = []
        for least in self.least:
            size = "more than any device" if least.gpu_bytes is None else format_rounded_up(least.gpu_bytes, unit)
            texts.append(f"{least.num_gpus} x {size}" + (f" {unit}" if not texts and least.gpu_bytes else ""))
        return f"smallest memory per GPU without offload: {' | '.join(texts)}"


def fits(structure: ModelStructure, options: PlanOptions, counts: Sequence[int] = COUNTS) -> GpuSizes:
    """Return the least equal memory per GPU, for each number of GPUs, on which a plan offloads nothing.

    Overhead, activations, and the caches and logits of `options.workload` are counted. One byte less does not do.
    """
    if options.policy == Policy.STREAMED:
        raise OptionError.of(
            "policy", str(options.policy), "one that keeps weights on GPUs, to say where all of them fit"
        )
    for count in counts:
        if not 1 <= count <= MAX_GPUS:
            raise OptionError(f"{count} GPUs: the number has to be 1 to {MAX_GPUS}")
    sizes, fixed = _sizes(structure, options), _fixed_bytes(structure, options)
    return GpuSizes(
        least=tuple(LeastMemory(num_gpus=count, gpu_bytes=_least_size(sizes, fixed, count)) for count in counts),
        fixed_bytes=fixed,
        largest=_largest(structure, options),
        unknown=structure.run_memory(options.workload).unknown,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusWithRam:
    """The RAM that `num_gpus` GPUs need beside them, so that nothing is on disk.

    Attributes:
        num_gpus: Of one size.
        ram_bytes: All of it are weights that are streamed. The least with which routed experts are all that is there,
            where that is possible; the least at all otherwise.
        only_experts: Whether routed experts are all that is in RAM.
        token_seconds: In which the bytes that one token needs cross the link.
        is_least: Whether it is proven that one byte less does not do: by the exact policy, unless its search took long.
    """

    num_gpus: int
    ram_bytes: int
    only_experts: bool
    token_seconds: float
    is_least: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNeeds(EveryGpu):
    """Number of GPUs of one size that a model needs.

    Attributes:
        gpu_bytes: Of each.
        without_offload: So many hold everything, and one less does not; `None` where no number does.
        with_ram: Fewer of them, and the RAM that they need then, the most GPUs first.
    """

    gpu_bytes: int
    without_offload: int | None
    with_ram: tuple[GpusWithRam, ...]

    def __str__(self) -> str:
        size = format_size(self.gpu_bytes)
        if self.without_offload is not None:
            texts = [f"needs {self.without_offload} x {size} without offload"]
        else:
            texts = [f"no number of GPUs of {size} holds it without offload"]
        for row in self.with_ram:
            unit, _ = common_unit([row.ram_bytes])
            ram = f"{format_rounded_up(row.ram_bytes, unit)} {unit} of RAM"
            experts = " with experts in RAM" if row.only_experts else ""
            texts.append(f"{row.num_gpus} x {size} + {ram}{experts}")
        return "; ".join(texts)


def gpus(structure: ModelStructure, options: PlanOptions, gpu_bytes: int) -> GpuNeeds:
    """Return how many GPUs of `gpu_bytes` a model needs, and the least RAM for one less, and for a single one."""
    if not 0 < gpu_bytes <= MAX_SIZE:
        raise OptionError("a GPU has more than 0 bytes and less than 8 EiB")
    fixed = _fixed_bytes(structure, options)
    number = _num_ranges(_sizes(structure, options), gpu_bytes - fixed)
    fewer = {1} if number is None else {number - 1, 1} if number > 1 else set()
    found = (_beside(structure, options, [gpu_bytes] * count) for count in sorted(fewer, reverse=True))
    return GpuNeeds(
        gpu_bytes=gpu_bytes,
        without_offload=number,
        with_ram=tuple(row for row in found if row is not None),
        fixed_bytes=fixed,
        largest=_largest(structure, options),
        unknown=structure.run_memory(options.workload).unknown,
    )


def _sizes(structure: ModelStructure, options: PlanOptions) -> list[int]:
    """Return what each unit takes on the GPU that holds it."""
    return [unit.num_bytes + unit.run_bytes for unit in structure.units(options.workload)]


def _fixed_bytes(structure: ModelStructure, options: PlanOptions) -> int:
    return structure.run_memory(options.workload).activation_bytes + options.overhead_of(Device("cuda", 0))


def _largest(structure: ModelStructure, options: PlanOptions) -> LargestUnit | None:
    units = structure.units(options.workload)
    found = max(units, key=lambda unit: unit.num_bytes + unit.run_bytes, default=None)
    if found is None:
        return None
    held = found.held_bytes
    return LargestUnit(name=found.name, num_bytes=found.num_bytes + held, run_bytes=found.run_bytes - held)


def _least_size(sizes: Sequence[int], fixed: int, count: int) -> int | None:
    if not sizes:
        return 0

    def suffices(room: int) -> bool:
        number = _num_ranges(sizes, room)
        return number is not None and number <= count

    if max(sizes) > MAX_SIZE:
        return None
    size = bisect_left(range(min(sum(sizes), MAX_SIZE)), x=True, lo=max(sizes), key=suffices) + fixed
    return size if size <= MAX_SIZE else None


def _num_ranges(sizes: Sequence[int], room: int) -> int | None:
    """Return into how many stretches of at most `room` bytes `sizes` can be cut at least; at least one."""
    number, used = 1, 0
    for size in sizes:
        used += size
        if used > room:
            number, used = number + 1, size
        if size > room:
            return None
    return number if room >= 0 or not sizes else None


def _beside(structure: ModelStructure, options: PlanOptions, limits: Sequence[int]) -> GpusWithRam | None:
    """Return the RAM beside GPUs of these sizes: for experts alone where that is possible, else the least at all."""
    weights = sum(unit.num_bytes for unit in structure.units(options.workload))
    accelerators = tuple((Device("cuda", index), limit) for index, limit in enumerate(limits))
    budget = MemoryBudget((*accelerators, (CPU, weights)))
    best: tuple[GpusWithRam, PlacementProblem] | None = None
    for apart in expert_forms(structure, options):
        problem = replace(problem_of(structure, budget, options, split_experts=apart), balance=Balance.FILL)
        for dear in {1, weights + 1} if apart else {1}:
            for placement in _least_streamed(problem, options.policy, dear):
                row = _with_ram(problem, placement)
                if best is None or _rank(row) < _rank(best[0]):
                    best = row, problem
    if best is None:
        return None
    row, problem = best
    enough = _enough_for(problem, options.policy, row.ram_bytes)
    return replace(row, ram_bytes=enough, is_least=row.is_least and enough == row.ram_bytes)


def _rank(row: GpusWithRam) -> tuple[bool, int, bool, float]:
    return not row.only_experts, row.ram_bytes, not row.is_least, row.token_seconds


def _with_ram(problem: PlacementProblem, placement: Placement) -> GpusWithRam:
    streamed = [unit for unit, device in zip(problem.units, placement.devices, strict=True) if device == CPU]
    return GpusWithRam(
        num_gpus=len(problem.accelerators),
        ram_bytes=sum(unit.num_bytes for unit in streamed),
        only_experts=all(unit.is_routed for unit in streamed),
        token_seconds=token_seconds(problem, placement),
        is_least=placement.is_proven,
    )


def _least_streamed(problem: PlacementProblem, policy: str, dear: int) -> Iterator[Placement]:
    """Yield placements with the fewest bytes in RAM; bytes of other units than experts count `dear`.

    That is what the exact policy looks for by itself when a token needs every byte, and it has all the RAM there could
    be. Filling in sequence is asked as well, because searches may be cut short.
    """
    asked = replace(problem, units=_all_needed(problem.units, dear))
    may_fill = policy_named(policy).is_exact and not any(unit.is_routed for unit in asked.units)
    for chosen in (policy, Policy.SEQUENTIAL) if may_fill else (policy,):
        placement = place_by(chosen, asked)
        if isinstance(placement, Placement):
            yield placement


def _all_needed(units: Sequence[Unit], dear: int) -> tuple[Unit, ...]:
    """Return units of which a token needs all bytes, those of units that do not ride on others `dear` times."""

    def needed(unit: Unit) -> Unit:
        times = 1 if unit.is_routed else dear
        return replace(unit, parts=tuple(part._replace(token_bytes=part.num_bytes * times) for part in unit.parts))

    return tuple(map(needed, units))


def _enough_for(problem: PlacementProblem, policy: str, ram_bytes: int) -> int:
    """Return the RAM with which the policy finds a placement: a little more where its search was cut short."""
    most = problem.budget.get(CPU) or 0
    for spare in (0, *(1 << step for step in range(_STEPS))):
        size = min(ram_bytes + (ram_bytes * spare >> _STEPS), most)
        if isinstance(place_by(policy, replace(problem, budget=problem.budget.with_limit(CPU, size))), Placement):
            return size
    return most
