"""Rows of the bench: what is measured, beside which limit, with which goals, and how a goal is judged."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path

from bigload.bench.page_cache_state import CacheState
from bigload.bench.runner import Contender, Measured, run_rounds
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.units import MIB, format_size
from harness import Goal, show_status
from make import Data, Recipe, load_recipe, make

_SLOW_FACTOR = 3


class CannotMeasureError(Exception):
    """The row cannot be measured on this machine; the message is half a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGoal:
    """A bound on how a contender compares with a limit that is measured in the same rounds.

    Attributes:
        contender: Name of the contender.
        limits: Regular expressions. Of the contenders that match one, the fastest by its median counts; the limit of a
            round is the longest time among them. Without any, the bound is one of the contender's own figures.
        bound: Of limit / contender where `is_least`, else of contender / limit.
        is_memory: Whether memory in MiB is compared instead of seconds.
    """

    text: str
    contender: str
    bound: float
    limits: tuple[str, ...] = ()
    is_least: bool = False
    is_memory: bool = False

    @property
    def unit(self) -> str:
        """Unit of the value and the bound."""
        if self.limits:
            return "x"
        return "MiB" if self.is_memory else "s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Figures of all contenders of a row, one per round.

    Attributes:
        seconds: Time by name.
        memory: Peak memory in MiB by name, above what the row calls its base.
        problems: Reason by name of a contender that failed or is not installed.
        cached: Least and largest share of the files in the page cache when runs began.
        remarks: Sentences about the conditions, such as files that stayed in the page cache.
    """

    seconds: Mapping[str, Sequence[float]]
    memory: Mapping[str, Sequence[float]] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    cached: tuple[float, float] | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A goal with its per-round values, or the problem because of which there are none."""

    goal: RowGoal
    values: tuple[float, ...] = ()
    limits: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def shown(self) -> Goal:
        """The goal with the median of its values, NaN without any, which reaches no bound."""
        median = statistics.median(self.values) if self.values else float("nan")
        goal = self.goal
        return Goal(text=goal.text, value=median, bound=goal.bound, is_least=goal.is_least, unit=goal.unit)

    @property
    def is_reached(self) -> bool:
        """Whether the median reaches the bound."""
        return self.shown.is_reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rows share.

    Attributes:
        checkpoints: Folder of checkpoints, which rows share.
        folder: Folder of what this row writes, on the same disk; removed after it.
        recipe: Name of the recipe of the checkpoint that most rows use.
        num_bytes: Its size in this row.
        rounds: Rounds of this row that count.
        opened: Closed after this row.
    """

    checkpoints: Path
    folder: Path
    recipe: str
    with_peers: bool
    opened: ExitStack
    num_bytes: int = 0
    rounds: int = 1
    _made: dict[str, Checkpoint] = field(default_factory=dict)

    @property
    def model(self) -> Checkpoint:
        """The checkpoint of most rows: random bytes in the shape of `recipe`. Rows of one size share it."""

        def recipe() -> Recipe:
            return of_size(load_recipe(self.recipe), self.num_bytes)

        return self._of(f"model-{self.num_bytes}", recipe, "random")

    def sparse(self, name: str) -> Checkpoint:
        """Return the checkpoint of recipe `name` in its full size, made of holes."""
        return self._of(name, lambda: load_recipe(name), "sparse")

    def _of(self, name: str, recipe: Callable[[], Recipe], data: Data) -> Checkpoint:
        if name not in self._made:
            show_status(f"making {name}")
            self._made[name] = open_checkpoint(make(recipe(), self.checkpoints / name, data=data).root)
        return self._made[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
        measure: Prepare and run all contenders in rotating order.
        packages: Packages without which nothing of the row can run.
        disk: Disk space that it needs, in sizes of the checkpoint.
        memory: Memory that it needs, likewise.
        is_quick: Whether it is a part of `--quick`.
    """

    name: str
    title: str
    measure: Callable[[Setting], Measurement]
    goals: tuple[RowGoal, ...]
    packages: tuple[str, ...] = ()
    disk: float = 1
    memory: float = 0
    is_quick: bool = False

    @property
    def names_peers(self) -> bool:
        """Whether a goal compares with another program."""
        return any("peer: " in limit for goal in self.goals for limit in goal.limits)


def judge(goal: RowGoal, measured: Measurement) -> Verdict:
    """Return the values of `goal` in each round."""
    figures = measured.memory if goal.is_memory else measured.seconds
    own = figures.get(goal.contender)
    if not own:
        reason = measured.problems.get(goal.contender, "it was not measured")
        return Verdict(goal=goal, problem=f"{goal.contender}: {reason}")
    if not goal.limits:
        return Verdict(goal=goal, values=tuple(own))
    fastest = []
    for pattern in goal.limits:
        found = {name: each for name, each in figures.items() if each and re.match(pattern, name)}
        if not found:
            failed = [f"{name}: {why}" for name, why in measured.problems.items() if re.match(pattern, name)]
            return Verdict(goal=goal, problem="; ".join(failed) or f"no contender matches {pattern!r}")
        fastest.append(min(found, key=lambda name: statistics.median(found[name])))
    rounds = zip(own, *(figures[name] for name in fastest), strict=True)
    ratios = tuple(max(limits) / mine if goal.is_least else mine / max(limits) for mine, *limits in rounds)
    return Verdict(goal=goal, values=ratios, limits=tuple(fastest))


def measured_rounds(
    setting: Setting,
    contenders: Sequence[Contender],
    *,
    files: Sequence[Path] = (),
    cache: CacheState = CacheState.AS_IS,
    renewed_bytes: int = 0,
    problems: Mapping[str, str] | None = None,
) -> Measurement:
    """Run `contenders` in rotating order and return what was measured after a first round, which is dropped.

    Of one that runs several times in a round, the median of these.

    Other programs that take more than three times as long as the fastest of them in that round are not repeated.
    """
    rounds = partial(run_rounds, files=files, cache=cache, renewed_bytes=renewed_bytes, on_run=show_status)
    first = rounds(contenders, runs=1)
    slow = slow_peers(contenders, first.measured)
    lasting = [each for each in contenders if each.name not in slow and each.name not in first.failures]
    outcome = rounds(lasting, runs=setting.rounds)
    cached = [share for found in outcome.measured.values() for share in found.cached]
    failures = {**first.failures, **outcome.failures}
    failed = {name: f"{type(error).__name__}: {error}" for name, error in failures.items()}
    return Measurement(
        seconds={name: per_round(found.seconds, setting.rounds) for name, found in outcome.measured.items()},
        memory={
            name: ((found.peak_private_bytes + found.peak_file_bytes) / MIB,)
            for name, found in outcome.measured.items()
            if files  # of other processes this one's memory says nothing
        },
        problems={**(problems or {}), **failed, **slow},
        cached=(min(cached), max(cached)) if files and cached else None,
        remarks=tuple(
            f"not cold: {'part' if left.num_bytes is None else format_size(left.num_bytes)} of {left.file} stayed in "
            f"the page cache: {left.reason}"
            for left in outcome.left_in_cache
        ),
    )


def slow_peers(contenders: Sequence[Contender], measured: Mapping[str, Measured]) -> dict[str, str]:
    """Return those that may fail and are far from the fastest of them, with the reason why they are not repeated."""
    taken = {
        each.name: measured[each.name].median_seconds for each in contenders if each.may_fail and each.name in measured
    }
    most = _SLOW_FACTOR * min(taken.values(), default=0)
    return {name: f"not repeated: {seconds:.2f} s" for name, seconds in taken.items() if seconds > most}


def per_round(seconds: Sequence[float], rounds: int) -> tuple[float, ...]:
    """Return one median per round of `seconds`, which has as many runs in each round.

    >>> per_round([1, 2, 9, 4, 5, 6], 2)
    (2, 5)
    """
    runs = len(seconds) // rounds
    return tuple(statistics.median(seconds[start : start + runs]) for start in range(0, runs * rounds, runs))


def files_of(checkpoint: Checkpoint) -> list[Path]:
    """Return the files of weights of `checkpoint`."""
    return [checkpoint.root / shard.file for shard in checkpoint.shards]


def of_size(recipe: Recipe, num_bytes: int) -> Recipe:
    """Return `recipe` with as many copies of its first layer as make at least `num_bytes`, in about 8 shards."""
    first = [tensor for tensor in recipe.tensors if tensor.name.startswith("model.layers.0.")]
    others = [tensor for tensor in recipe.tensors if not tensor.name.startswith("model.layers.")]
    layer_bytes, other_bytes = (sum(tensor.num_bytes for tensor in each) for each in (first, others))
    count = max(1, ceil((num_bytes - other_bytes) / layer_bytes))
    layers = [replace(tensor, name=tensor.name.replace(".0.", f".{n}.", 1)) for n in range(count) for tensor in first]
    return replace(
        recipe,
        config={**recipe.config, "num_hidden_layers": count},
        tensors=(*others, *layers),
        max_shard_bytes=(count * layer_bytes + other_bytes) * 10 // 72,  # tensors do not fill files to the last byte
    )
