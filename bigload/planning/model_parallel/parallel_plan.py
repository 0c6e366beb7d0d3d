"""A parallel plan: which rank holds which part of a model, and what that costs its GPU.

Ranks are tensor-parallel within pipeline stages. A plan is data, as that of one machine is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bigload.documents import fields
from bigload.plain_text import PlainTable, printable
from bigload.planning.model_parallel.rank_grid import Communication, Links, RankGrid
from bigload.planning.module_table import folded_names, ranges
from bigload.planning.options import rank_keywords
from bigload.planning.plan import (
    SHORTEST_SECONDS,
    MemoryUse,
    PlannedCheckpoint,
    duration,
    figures,
    running,
    tokens,
    usage_bar,
)
from bigload.planning.workload import PREFILL_CHUNK
from bigload.units import common_unit, counted, format_size

TERMS = ("weights", "padding", "kv", "logits", "activation", "overhead")
"""What takes memory on a GPU, in the order in which equations show it."""

COUNTS = ("num_sums", "num_host_sums", "num_sends", "num_host_sends", "message_bytes", "logits_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankUse(MemoryUse):
    """Memory of one rank: of its part of the stage's weights, of what they need, and of logits of the whole vocabulary.

    Its weights are what `bigload reshard` writes for it, if nothing is cast.
    """

    rank: int
    budget_bytes: int

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True, kw_only=True)
class ParallelPlan(PlannedCheckpoint):
    """Ranks of every tensor of a checkpoint that they divide.

    Attributes:
        grid: Ranks, stages and hosts.
        links: What communication is estimated with.
        tp_rules: Styles by pattern that go before those of the family.
        stages: The modules of each stage, in execution order: every tensor is below one of them, unless it is left out.
            A module whose weights are used in several stages is named in each.
        ranks: A row for each rank.
        communication: What ranks send one another in a forward pass.
    """

    schema = "bigload.parallel-plan/1.0"
    kind = "plan file for ranks"

    grid: RankGrid
    links: Links
    tp_rules: Mapping[str, str]
    stages: tuple[tuple[str, ...], ...]
    ranks: tuple[RankUse, ...]
    communication: Communication

    @property
    def gpu_bytes(self) -> int:
        """The limit of each GPU."""
        return self.ranks[0].budget_bytes

    def ranks_of(self, stage: int) -> tuple[RankUse, ...]:
        """Return the rows of the ranks of `stage`."""
        return tuple(self.ranks[rank] for rank in self.grid.ranks_of(stage))

    def fullest(self, stage: int) -> RankUse:
        """Return the row of the rank of `stage` that uses most memory, the first of several."""
        return max(self.ranks_of(stage), key=lambda use: use.used_bytes)

    def token_seconds(self) -> float:
        """Return the least time that communication takes for one token of each sequence."""
        return self.communication.seconds(self.links)

    def shown(self, *, blocks: bool, times: str | None = None) -> Iterator[str | PlainTable]:  # noqa: ARG002
        yield headline(self)
        yield from ("", stage_table(self, blocks=blocks), "")
        yield from closing_lines(self)

    def document(self) -> dict[str, object]:
        grid, sent = self.grid, self.communication
        return {
            "schema": self.schema,
            "checkpoint": self._about_checkpoint(),
            **fields(grid, "tp", "pp", "hosts"),
            "options": {**rank_keywords(self.options), "mtp": self.options.keep_extra_layers},
            "tp_rules": dict(self.tp_rules),
            "links": {"gpu_bandwidth": self.links.gpu, "host_bandwidth": self.links.host},
            "stages": [{"modules": list(modules)} for modules in self.stages],
            "left_out": list(self.left_out),
            "ranks": [
                {
                    "rank": use.rank,
                    "stage": grid.stage_of(use.rank),
                    "host": grid.host_of(use.rank),
                    "gpu": use.rank % grid.gpus_per_host,
                    "budget_bytes": use.budget_bytes,
                    **{f"{term}_bytes": getattr(use, f"{term}_bytes") for term in TERMS},
                    "free_bytes": use.free_bytes,
                }
                for use in self.ranks
            ],
            "communication": {
                **{name: getattr(sent, name) for name in COUNTS},
                "logits_cross_hosts": sent.logits_cross_hosts,
                "token_seconds": self.token_seconds(),
            },
            "notes": self._named_notes(),
        }


def what_fits(plan: ParallelPlan) -> str:
    """Return what fits where."""
    gpus = f"{plan.grid.gpus_per_host} x {format_size(plan.gpu_bytes)}"
    where = gpus if plan.grid.hosts == 1 else f"{plan.grid.hosts} hosts of {gpus}"
    return f"{printable(plan.name)} fits {where}: TP {plan.grid.tp} x PP {plan.grid.pp}"


def headline(plan: ParallelPlan) -> str:
    """Return what fits where, in one line, and what the figures of the table are about, in another."""
    workload = plan.options.workload
    text = f"{format_size(plan.total_bytes)} as stored"
    if workload.load_dtype is not None:
        text += f", loaded as {workload.load_dtype}"
    unit, _ = common_unit([plan.gpu_bytes])
    return f"{what_fits(plan)}\n{text}{tokens(workload)}; figures of one GPU, in {unit}"


def stage_table(plan: ParallelPlan, *, blocks: bool) -> PlainTable:
    """Return a row for each stage, with the figures of its fullest rank: limit = weights + caches + run + free."""
    terms = ("weights", *(["kv"] if any(use.kv_bytes for use in plan.ranks) else ()), "run")
    right = ("STAGE", "HOST", "RANKS", "LIMIT =", *(f"{term.upper()} +" for term in terms), "FREE")
    table = PlainTable((*right, "USE", "HOLDS"), right=right, folding="HOLDS", droppable="USE")
    for stage, modules in enumerate(plan.stages):
        use, places = plan.fullest(stage), (plan.grid.hosts_of(stage), plan.grid.ranks_of(stage))
        cells = (str(stage), *map(ranges, places), *figures(use, terms, common_unit([plan.gpu_bytes])[1]))
        table.add(*cells, usage_bar(use, blocks=blocks), folded_names(modules))
    return table


def closing_lines(plan: ParallelPlan) -> list[str]:
    """Return the lines below the table: what running takes, what ranks send one another, and notes."""
    one, uses = plan.grid.pp == 1, ((stage, plan.fullest(stage)) for stage in range(plan.grid.pp))
    return [
        *(f"RUN is {words}" + ("." if one else f" in {_stages(stages)}.") for words, stages in running(uses).items()),
        *communication_lines(plan),
        *(f"note: {printable(note.text)}" for note in plan.notes),
    ]


def communication_lines(plan: ParallelPlan) -> list[str]:
    """Return sentences on what ranks send one another, and how long that takes at least; none for a single rank."""
    sent = plan.communication
    counts = (
        (sent.num_sums, "all-reduce", f"among {sent.tp} ranks of a host"),
        (sent.num_host_sums, "all-reduce", f"among {sent.tp} ranks of several hosts"),
        (sent.num_sends, "send", "within a host"),
        (sent.num_host_sends, "send", "to another host"),
    )
    passed = [f"{counted(number, what)} {where}" for number, what, where in counts if number]
    if not passed or not sent.message_bytes:
        return []
    workload = plan.options.workload
    chunk = min(workload.context or PREFILL_CHUNK, PREFILL_CHUNK)
    least = sent.seconds(plan.links, chunk)
    of_each = f" of {counted(workload.batch, 'sequence')}" if workload.batch > 1 else ""
    links = f"{_rate(plan.links.gpu)} within a host" + (
        f" and {_rate(plan.links.host)} between hosts" if plan.grid.hosts > 1 else ""
    )
    gathered = f", and a gather of {format_size(sent.logits_bytes)} of logits" if sent.logits_bytes else ""
    return [
        f"A token{of_each} takes {', '.join(passed)}, of {format_size(sent.message_bytes)} each{gathered}.",
        f"At {links} that is {_least(plan.token_seconds())}, and {_least(least)} for a chunk of {chunk} tokens, "
        "without latencies.",
    ]


def _least(seconds: float) -> str:
    return f"at least {duration(seconds) if seconds >= SHORTEST_SECONDS else f'{seconds * 10**6:.1f} µs'}"


def _rate(num_bytes: int) -> str:
    return f"{num_bytes / 10**9:g} GB/s"


def _stages(stages: Sequence[int]) -> str:
    return f"{'stage' if len(stages) == 1 else 'stages'} {ranges(stages)}"
