"""Make a parallel plan: divide a model among tensor-parallel ranks, cut it into stages, count what each rank takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Unpack

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.quantisation import quantisation_of
from bigload.checkpoint.records.fingerprint import fingerprint
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import DoesNotFitError, OptionError
from bigload.planning.advice import rounded, written
from bigload.planning.choices import Policy
from bigload.planning.model.module_tree import key_above
from bigload.planning.model_parallel.divided_model import DividedModel
from bigload.planning.model_parallel.parallel_plan import ParallelPlan, RankUse
from bigload.planning.model_parallel.rank_grid import GPU_BANDWIDTH, HOST_BANDWIDTH, Links, RankGrid
from bigload.planning.options import CUDA_OVERHEAD, PlanOptions, RankKeywords, options_of
from bigload.planning.plan import PlanNote
from bigload.planning.workload import Workload
from bigload.units import counted, format_size, parse_size

_MOST_TRIED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelRequest:
    """Request for a parallel plan, beside its checkpoint.

    `options` has the workload, the overhead of each GPU, and whether layers of further tokens are placed; `tp_rules`
    are styles by pattern that go before those of the family.
    """

    grid: RankGrid
    options: PlanOptions
    tp_rules: Mapping[str, str]
    links: Links = field(default_factory=Links)

    def __post_init__(self) -> None:
        """Check what contradicts itself."""
        options = self.options
        if options.lora or options.expert_stats is not None or options.no_split or options.quantize:
            text = "adapters, recorded experts, --no-split and --quantize are for plans of one machine"
            raise OptionError(text, hint="leave them out")
        if self.options.policy != Policy.OPTIMAL:
            raise OptionError(f"the {self.options.policy} policy places modules on devices of one machine")

    @property
    def overhead_bytes(self) -> int:
        """Of each GPU."""
        return CUDA_OVERHEAD if self.options.overhead is None else self.options.overhead


def plan_ranks(
    checkpoint: Checkpoint | str | Path,
    gpu_memory: int | str,
    *,
    tp: int = 1,
    pp: int = 1,
    hosts: int = 1,
    tp_rules: Mapping[str, str] | None = None,
    gpu_bandwidth: int = GPU_BANDWIDTH,
    host_bandwidth: int = HOST_BANDWIDTH,
    **keywords: Unpack[RankKeywords],
) -> ParallelPlan:
    """Plan a checkpoint for `pp` pipeline stages of `tp` tensor-parallel ranks on `hosts`, one GPU a rank.

    `gpu_memory` is the limit of each GPU, in bytes or as text such as `"80GiB"`. `tp_rules`, styles by pattern, go
    before the rules of the architecture. Bandwidths are bytes per second from a GPU to others of its host, and to those
    of other hosts. Other keywords are those of `bigload.plan`: `context`, `batch`, `dtype`, `kv_dtype`, `attention`,
    `overhead`, `mtp`. `write_parallel_plan` writes the plan, `reshard` carries it out.

    Raises:
        DoesNotFitError: a stage takes more than a GPU has; the hint says what would do.
        PartitionError: heads, experts or features do not divide among `tp` ranks, or no rule says how.
        OptionError: a number that cannot be, or more stages than blocks.
        CheckpointError: the checkpoint cannot be opened.
        TypeError: a keyword that is not one of these.
    """
    if unknown := keywords.keys() - RankKeywords.__annotations__.keys():
        raise TypeError(f"no option {', '.join(sorted(unknown))}; known are {', '.join(RankKeywords.__annotations__)}")
    try:
        gpu_bytes = parse_size(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    except ValueError as error:
        raise OptionError.of("gpu_memory", gpu_memory, f"bytes, or text such as 80GiB ({error})") from None
    if gpu_bytes <= 0:
        raise OptionError.of("gpu_memory", gpu_bytes, "more than 0 bytes")
    asked = ParallelRequest(
        grid=RankGrid(tp=tp, pp=pp, hosts=hosts),
        options=options_of(**keywords),
        tp_rules=tp_rules or {},
        links=Links(gpu=gpu_bandwidth, host=host_bandwidth),
    )
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    return plan_parallel(opened, gpu_bytes, asked)


def divide(checkpoint: Checkpoint, request: ParallelRequest) -> DividedModel:
    """Divide `checkpoint` among the ranks of a stage."""
    model = DividedModel.of(checkpoint, request.grid.tp, request.options, request.tp_rules)
    if request.grid.pp > model.num_blocks:
        raise OptionError.of("pp", request.grid.pp, f"at most {model.num_blocks}: {checkpoint.name} has so many blocks")
    return model


def plan_parallel(checkpoint: Checkpoint, gpu_bytes: int, request: ParallelRequest) -> ParallelPlan:
    """Plan a model for the ranks of `request.grid`, each with a GPU of `gpu_bytes`."""
    return plan_divided(divide(checkpoint, request), gpu_bytes, request)


def plan_divided(model: DividedModel, gpu_bytes: int, request: ParallelRequest) -> ParallelPlan:
    """Plan a model that is divided already; see `plan_parallel`."""
    made = _plan(model, gpu_bytes, request)
    if min(use.free_bytes for use in made.ranks) < 0:
        raise _does_not_fit(made, model, request)
    return made


def _plan(model: DividedModel, gpu_bytes: int, request: ParallelRequest) -> ParallelPlan:
    """Return the plan, even where its ranks take more than GPUs have."""
    workload, grid, checkpoint = request.options.workload, request.grid, model.checkpoint
    stages = model.stages(grid.pp, workload)
    communication = model.communication(grid, stages, workload)
    return ParallelPlan(
        checkpoint_path=checkpoint.path,
        total_bytes=checkpoint.total_bytes,
        shards=fingerprint(checkpoint),
        options=request.options,
        grid=grid,
        links=request.links,
        tp_rules=request.tp_rules,
        stages=stages,
        ranks=tuple(_rank_uses(model, stages, gpu_bytes, request)),
        communication=communication,
        left_out=model.structure.left_out,
        notes=tuple(_notes(model, grid, workload)),
    )


def _rank_uses(
    model: DividedModel, stages: Sequence[tuple[str, ...]], gpu_bytes: int, request: ParallelRequest
) -> Iterator[RankUse]:
    workload, grid = request.options.workload, request.grid
    needs = model.run_memory(workload)
    for stage, modules in enumerate(stages):
        names = frozenset(modules)
        weights, padding, cache = (
            model.weights_bytes(modules),
            model.padding_bytes(names),
            model.kv_bytes(names, workload),
        )
        for place, rank in enumerate(grid.ranks_of(stage)):
            yield RankUse(
                rank=rank,
                budget_bytes=gpu_bytes,
                weights_bytes=weights[place],
                padding_bytes=padding[place],
                kv_bytes=cache,
                logits_bytes=needs.logits_bytes if stage == grid.pp - 1 else 0,
                activation_bytes=needs.activation_bytes,
                overhead_bytes=request.overhead_bytes,
            )


def _does_not_fit(made: ParallelPlan, model: DividedModel, request: ParallelRequest) -> DoesNotFitError:
    stage = max(range(made.grid.pp), key=lambda stage: made.fullest(stage).used_bytes)
    use = made.fullest(stage)
    terms = {
        "weights": use.weights_bytes,
        "KV cache": use.kv_bytes,
        "logits": use.logits_bytes,
        "activations": use.activation_bytes,
        "overhead": use.overhead_bytes,
        "padding": use.padding_bytes,
    }
    words = " + ".join(f"{format_size(size)} {term}" for term, size in terms.items() if size)
    enough = [f"-m {written(rounded(use.used_bytes))}"]
    largest = min(model.num_blocks, _MOST_TRIED * made.grid.pp)
    for pp in range(made.grid.pp + 1, largest + 1):
        if model.fullest_bytes(pp, request.options.workload) + request.overhead_bytes <= use.budget_bytes:
            enough.append(f"--pp {pp}, which is {counted(pp * made.grid.tp, 'GPU')} in all")
            break
    return DoesNotFitError(
        made.name,
        needed_bytes=use.used_bytes,
        usable_bytes=use.budget_bytes,
        shortfalls={"total": use.used_bytes - use.budget_bytes},
        where=f" on each GPU of stage {stage}" if made.grid.pp > 1 else " on each GPU",
        details=[f"{made.grid}: {words}"],
        hint=f"this would do: {'; or '.join(enough)}",
    )


def _notes(model: DividedModel, grid: RankGrid, workload: Workload) -> Iterator[PlanNote]:
    structure = model.structure
    left_out = structure.extra_layers
    held = frozenset(name for name in model.checkpoint.tensors if key_above(name, left_out) is None)
    yield from model.divided.noting(model.checkpoint, held).notes
    if structure.extra_layers:
        names = ", ".join(structure.extra_layers)
        text = f"no rank holds layers that only predict further tokens: {names}; --mtp places them too"
        yield PlanNote(code="left-out", text=text)
    if structure.experts and grid.tp > 1:
        text = "experts are divided among all ranks of a stage; expert-parallel ranks hold whole ones, of the same size"
        yield PlanNote(code="experts", text=text)
    for tie in structure.ties:
        if tie.absent_modules and grid.pp > 1:
            text = f"{', '.join(tie.absent_modules)} shares {tie.stored[0]}, which each stage that uses it holds"
            yield PlanNote(code="tied", text=text)
    crossing = [stage for stage in range(grid.pp) if len(grid.hosts_of(stage)) > 1]
    if crossing and grid.tp > 1:
        text = "ranks of a stage are on several hosts, so their sums cross the slower links"
        yield PlanNote(code="crosses-hosts", text=f"{text}; those of --tp {_fitting(grid)} do not")
    quantised = quantisation_of(model.checkpoint)
    if quantised is not None:
        text = f"weights are quantised, {quantised}: counted as they are stored, without room to unpack them"
        yield PlanNote(code="quantised", text=text)
    for text in structure.run_memory(workload).unknown:
        yield PlanNote(code="unknown", text=text)
    if workload.context:
        for code, text in structure.memory.assumptions(workload):
            yield PlanNote(code=code, text=text)


def _fitting(grid: RankGrid) -> int:
    """Return the most ranks of a stage that divide the GPUs of a host."""
    return max(tp for tp in range(1, grid.gpus_per_host + 1) if grid.gpus_per_host % tp == 0 and tp <= grid.tp)
