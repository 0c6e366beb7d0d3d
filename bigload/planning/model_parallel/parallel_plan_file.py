"""The file of a parallel plan: JSON, `bigload.parallel-plan/1.0`, described in docs/schemas/parallel-plan-1.0.json.

It is another document than a plan for one machine, so what reads only those refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bigload.checkpoint.model import Checkpoint
from bigload.documents import count_of, typed
from bigload.planning.model_parallel.divided_model import DividedModel
from bigload.planning.model_parallel.parallel_plan import COUNTS, TERMS, ParallelPlan, RankUse
from bigload.planning.model_parallel.rank_grid import Communication, Links, RankGrid
from bigload.planning.options import PlanOptions, RankKeywords, options_of
from bigload.planning.plan_document import names_in, subject_in
from bigload.planning.plan_file import (
    check_subject,
    is_plan,
    open_unchanged,
    parse_plan,
    plan_text,
    refuse_plan,
    write_plan,
)


def write_parallel_plan(plan: ParallelPlan, path: str | Path) -> None:
    """Write the file at `path`, whole or not at all; replaces another plan for ranks, and nothing else.

    Raises:
        OutputExistsError: something that is no such plan stands there.
        WriteError: the system refused.
    """
    write_plan(plan, path)


def is_parallel_plan(path: str | Path) -> bool:
    """Return whether `path` is a file that says it is a parallel plan, of whatever version."""
    return is_plan(Path(path), schema=ParallelPlan.schema)


def read_parallel_plan(path: str | Path) -> ParallelPlan:
    """Read the parallel plan in the file at `path`.

    Raises:
        PlanNotFoundError: there is no such file, or it cannot be read.
        InvalidPlanError: no parallel plan, another major version, or figures that contradict each other.
    """
    return parallel_plan_from_json(plan_text(path), source=str(path))


def parallel_plan_from_json(text: str, *, source: str = "the plan") -> ParallelPlan:
    """Return the plan that `text` describes; `source` names it in errors."""
    return parse_plan(text, ParallelPlan.schema, _plan, source=source)


def open_parallel_planned(
    plan: ParallelPlan, path: str | Path | Checkpoint | None = None, *, source: str = "the plan"
) -> Checkpoint:
    """Open the checkpoint that `plan` was made for, by default where it says, and check the plan against it."""
    opened = open_unchanged(plan.shards, plan.checkpoint_path if path is None else path, source=source)
    check_parallel_plan(plan, opened, source=source)
    return opened


def check_parallel_plan(plan: ParallelPlan, checkpoint: Checkpoint, *, source: str = "the plan") -> None:
    """Raise unless `plan` was made for `checkpoint` as it is now, and its rows hold what its stages do."""
    check_subject(plan, checkpoint, source=source)
    model = DividedModel.of(checkpoint, plan.grid.tp, plan.options, plan.tp_rules)
    missing = model.not_below({name for modules in (*plan.stages, plan.left_out) for name in modules})
    if missing is not None:
        refuse_plan(source, f"no stage has tensor {missing!r}")
    for stage, modules in enumerate(plan.stages):
        counted = model.weights_bytes(modules)
        for use, num_bytes in zip(plan.ranks_of(stage), counted, strict=True):
            if use.weights_bytes != num_bytes:
                refuse_plan(source, f"it gives rank {use.rank} {use.weights_bytes} bytes, its stage {num_bytes}")


def _plan(document: Mapping[str, object]) -> ParallelPlan:
    grid = RankGrid(tp=typed(document, "tp", int), pp=typed(document, "pp", int), hosts=typed(document, "hosts", int))
    stages = tuple(names_in(stage, "modules") for stage in typed(document, "stages", list))
    rows = typed(document, "ranks", list)
    if len(stages) != grid.pp or len(rows) != grid.num_ranks:
        raise ValueError(f"it has {len(stages)} stages and {len(rows)} ranks, expected {grid.pp} and {grid.num_ranks}")
    uses = tuple(_rank_use(entry, rank, grid) for rank, entry in enumerate(rows))
    if len({use.budget_bytes for use in uses}) > 1:
        raise ValueError("its GPUs have several limits")
    rules = typed(document, "tp_rules", dict)
    if not all(isinstance(style, str) for style in rules.values()):
        raise TypeError('"tp_rules" has a style that is no text')
    links, sent = typed(document, "links", dict), typed(document, "communication", dict)
    return ParallelPlan(
        **subject_in(document),
        options=_options(typed(document, "options", dict)),
        grid=grid,
        links=Links(gpu=typed(links, "gpu_bandwidth", int), host=typed(links, "host_bandwidth", int)),
        tp_rules=rules,
        stages=stages,
        ranks=uses,
        communication=Communication(
            tp=grid.tp,
            logits_cross_hosts=bool(sent["logits_cross_hosts"]),
            **{name: count_of(sent[name], name) for name in COUNTS},
        ),
    )


def _options(entry: Mapping[str, object]) -> PlanOptions:
    if entry["overhead"] is not None:
        typed(entry, "overhead", int)
    return options_of(**{key: entry[key] for key in RankKeywords.__annotations__})  # type: ignore[arg-type]


def _rank_use(entry: Mapping[str, object], rank: int, grid: RankGrid) -> RankUse:
    if (typed(entry, "rank", int), typed(entry, "stage", int)) != (rank, grid.stage_of(rank)):
        raise ValueError(f"row {rank} is not that of rank {rank} in stage {grid.stage_of(rank)}")
    use = RankUse(
        rank=rank,
        budget_bytes=typed(entry, "budget_bytes", int),
        **{f"{term}_bytes": count_of(entry[f"{term}_bytes"], term) for term in TERMS},
    )
    if use.free_bytes != entry["free_bytes"] or use.free_bytes < 0:
        raise ValueError(f"rank {rank}: budget, {', '.join(TERMS)} and free do not add up")
    return use
