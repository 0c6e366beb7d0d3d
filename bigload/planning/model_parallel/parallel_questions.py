"""Questions about parallel plans: the largest context, the least memory of GPUs, and why a module is where it is."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from bigload.checkpoint.model import Checkpoint, forms_of
from bigload.errors import OptionError, PartitionError
from bigload.planning.load_dtype import as_loaded
from bigload.planning.model.module_tree import build_tree, key_above
from bigload.planning.model_parallel.divided_model import DividedModel
from bigload.planning.model_parallel.parallel_plan import ParallelPlan
from bigload.planning.model_parallel.parallel_planner import (
    ParallelRequest,
    divide,
    plan_divided,
)
from bigload.planning.model_parallel.rank_grid import RankGrid
from bigload.planning.module_table import ranges
from bigload.planning.plan import PlanNote
from bigload.planning.questions.max_context import MaxContext
from bigload.planning.questions.name_lookup import name_among
from bigload.planning.tensor_parallel.rank_part import part_form
from bigload.planning.workload import MAX_CONTEXT
from bigload.units import common_unit, counted, format_rounded_up, format_size


def largest_context(checkpoint: Checkpoint, gpu_bytes: int, request: ParallelRequest) -> MaxContext:
    """Return the most tokens of each sequence that the ranks hold; the context of the request does not matter.

    What a longer context takes is never less, so halving over tokens finds it.
    """
    model, workload = divide(checkpoint, request), request.options.workload

    def fits(context: int) -> bool:
        needed = model.fullest_bytes(request.grid.pp, replace(workload, context=context))
        return needed + request.overhead_bytes <= gpu_bytes

    if not fits(0):
        without = replace(request, options=replace(request.options, workload=replace(workload, context=0)))
        plan_divided(model, gpu_bytes, without)  # raises, and says what is short
    most = bisect_left(range(MAX_CONTEXT), x=True, key=lambda tokens: not fits(tokens + 1))
    needs = model.run_memory(replace(workload, context=1))
    found = None if most == MAX_CONTEXT else most
    return MaxContext(
        batch=workload.batch,
        unslowed_tokens=found,
        most_tokens=found,
        is_offloaded=False,
        grows=model.fullest_bytes(request.grid.pp, replace(workload, context=MAX_CONTEXT))
        != model.fullest_bytes(request.grid.pp, replace(workload, context=MAX_CONTEXT // 2)),
        trained_tokens=model.structure.config.count("trained_context"),
        unknown=needs.unknown,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GridMemory:
    """Memory of one division of a model.

    Attributes:
        grid: The way; its hosts are those of the question.
        gpu_bytes: The least memory of each GPU, to the byte; `None` where the model does not divide that way.
        token_seconds: In which the bytes arrive that ranks send one another for one token.
    """

    grid: RankGrid
    gpu_bytes: int | None
    token_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastGpuMemory:
    """The least memory of each GPU for a grid, and for other grids of as many GPUs, most tensor-parallel ranks first.

    `asked` is one of `grids`.
    """

    asked: GridMemory
    grids: tuple[GridMemory, ...]

    def __str__(self) -> str:
        assert self.asked.gpu_bytes is not None, "it divides, or an error said so"
        unit, _ = common_unit([self.asked.gpu_bytes])
        least = f"{format_rounded_up(self.asked.gpu_bytes, unit)} {unit}"
        return f"smallest memory per GPU: {self.asked.grid.num_ranks} x {least} for {self.asked.grid}"


def least_memory(checkpoint: Checkpoint, request: ParallelRequest) -> LeastGpuMemory:
    """Return the least equal memory of GPUs on which a plan fits, one byte less does not."""
    asked, grids = _memory(checkpoint, request), []
    for tp in _divisors(request.grid.num_ranks):
        grid = replace(request.grid, tp=tp, pp=request.grid.num_ranks // tp)
        if grid == request.grid:
            grids.append(asked)
            continue
        try:
            grids.append(_memory(checkpoint, replace(request, grid=grid)))
        except (PartitionError, OptionError) as error:
            reason = error.details[0] if error.details else error.message
            grids.append(GridMemory(grid=grid, gpu_bytes=None, reason=reason))
    return LeastGpuMemory(asked=asked, grids=tuple(grids))


def _memory(checkpoint: Checkpoint, request: ParallelRequest) -> GridMemory:
    model, workload = divide(checkpoint, request), request.options.workload
    sent = model.communication(request.grid, model.stages(request.grid.pp, workload), workload)
    least = model.fullest_bytes(request.grid.pp, workload) + request.overhead_bytes
    return GridMemory(grid=request.grid, gpu_bytes=least, token_seconds=sent.seconds(request.links))


def _divisors(number: int) -> list[int]:
    return [tp for tp in range(number, 0, -1) if number % tp == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExplanation:
    """Reasons for the ranks of a module.

    Attributes:
        name: Of the module or tensor in the checkpoint.
        stages: Those that hold it; none for what is left out.
        weights_bytes: Of all of it, as it is loaded.
        rank_bytes: Of it on the first rank of a stage.
        kv_bytes: Of its cache on each rank.
        reasons: Sentences on how it is divided, and why its stage is this one.
    """

    name: str
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    weights_bytes: int
    rank_bytes: int
    kv_bytes: int
    headline: str
    reasons: tuple[PlanNote, ...]


def explain_rank(checkpoint: Checkpoint, gpu_bytes: int, request: ParallelRequest, asked: str) -> RankExplanation:
    """Say where the module or tensor `asked` is under the plan for `request`, and why."""
    model = divide(checkpoint, request)
    plan = plan_divided(model, gpu_bytes, request)
    modules = [node.name for node in build_tree(checkpoint.tensors).walk() if node.name]
    name = name_among([*modules, *checkpoint.tensors], asked, suggested=[])
    stages = tuple(
        stage
        for stage, modules in enumerate(plan.stages)
        if key_above(name, modules) is not None or any(module.startswith(f"{name}.") for module in modules)
    )
    divided = _divided(model, name, plan)
    ranks = tuple(rank for stage in stages for rank in plan.grid.ranks_of(stage))
    hosts = sorted({plan.grid.host_of(rank) for rank in ranks})
    size = format_size(divided.weights_bytes)
    if stages:
        at = f"in {'stage' if len(stages) == 1 else 'stages'} {ranges(stages)}, on ranks {ranges(ranks)}"
        headline = f"{name} ({size}) is {at}" + (
            f" of {'host' if len(hosts) == 1 else 'hosts'} {ranges(hosts)}" if plan.grid.hosts > 1 else ""
        )
    else:
        headline = f"{name} ({size}) is on no rank"
    cached = model.kv_bytes({name}, request.options.workload)
    return RankExplanation(
        name=name,
        stages=stages,
        ranks=ranks,
        weights_bytes=divided.weights_bytes,
        rank_bytes=divided.rank_bytes if stages else 0,
        kv_bytes=cached,
        headline=headline,
        reasons=tuple(_reasons(plan, model, stages, divided, cached)),
    )


class _Divided(NamedTuple):
    """Bytes of a module: of all, on one rank, of tensors that are whole on each rank; and how many are which."""

    weights_bytes: int = 0
    rank_bytes: int = 0
    whole_bytes: int = 0
    num_divided: int = 0
    num_whole: int = 0
    num_shared: int = 0


def _divided(model: DividedModel, name: str, plan: ParallelPlan) -> _Divided:
    """Count what is in the module or tensor `name`."""
    found = Counter[str]()
    for each, form in forms_of(as_loaded(model.checkpoint.tensors, plan.options.workload.load_dtype)).items():
        if each == name or each.startswith(f"{name}."):
            division = model.divided.divisions[each]
            found["weights_bytes"] += form.num_bytes
            found["rank_bytes"] += part_form(form, division, 0).num_bytes
            found["whole_bytes"] += form.num_bytes if division.dim is None else 0
            found["num_whole" if division.dim is None else "num_shared" if division.is_shared else "num_divided"] += 1
    return _Divided(**found)


def _reasons(
    plan: ParallelPlan, model: DividedModel, stages: tuple[int, ...], divided: _Divided, cached: int
) -> Iterator[PlanNote]:
    if not stages:
        yield PlanNote(code="left-out", text="no ordinary forward pass runs it; --mtp places it too")
        return
    tp, pp = plan.grid.tp, plan.grid.pp
    if tp > 1:
        parts = []
        if divided.num_divided:
            parts.append(f"{counted(divided.num_divided, 'tensor')} divided among {tp} ranks")
        if divided.num_shared:
            parts.append(f"{counted(divided.num_shared, 'tensor')} divided by heads that several ranks share")
        if divided.num_whole:
            parts.append(f"{counted(divided.num_whole, 'tensor')} ({format_size(divided.whole_bytes)}) whole on each")
        text = f"a rank holds {format_size(divided.rank_bytes)} of it: {', '.join(parts)}"
        yield PlanNote(code="division", text=text)
    if cached:
        yield PlanNote(code="cache", text=f"its KV cache takes {format_size(cached)} on each rank")
    if len(stages) > 1:
        yield PlanNote(code="repeated", text="each stage that uses its weights holds them")
    if pp == 1:
        return
    now = max(plan.fullest(stage).used_bytes for stage in range(pp))
    fullest = max(range(pp), key=lambda stage: plan.fullest(stage).used_bytes)
    yield PlanNote(
        code="balance",
        text=f"stages are cut so that the fullest rank is least full: stage {fullest} with {format_size(now)}",
    )
    yield from _neighbours(plan, model, stages[0])


def _neighbours(plan: ParallelPlan, model: DividedModel, stage: int) -> Iterator[PlanNote]:
    """Say what the stages before and after would use if they had one more block."""
    blocks = list(dict.fromkeys(block for name in plan.stages[stage] if (block := key_above(name, model.blocks))))
    for other, end in ((stage - 1, 0), (stage + 1, -1)):
        if 0 <= other < plan.grid.pp and len(blocks) > 1:
            moved = frozenset(name for name in plan.stages[stage] if key_above(name, model.blocks) == blocks[end])
            more = model.weights_bytes(moved)[0] + model.kv_bytes(moved, plan.options.workload)
            used = format_size(plan.fullest(other).used_bytes + more)
            text = f"with {blocks[end]} too, a rank of stage {other} would use {used}"
            yield PlanNote(code="neighbour", text=text)
