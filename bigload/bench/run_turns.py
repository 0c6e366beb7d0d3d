"""Have contenders run a model by turns and take the time of each run.

Each turn makes the model anew and lets go of it: nobody's mapped pages keep the page cache warm for the next one, and
only one model is in memory at a time. The order is another one in each round.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from bigload.bench.page_cache_state import CacheState, LeftInCache, evict_verified
from bigload.bench.run_contenders import Prepared
from bigload.bench.runner import Clock, OnRun, rotated
from bigload.machine.page_cache import cached_fraction
from bigload.machine.process_memory import MemorySampler, resident_memory
from bigload.runtime.streaming.run_log import RunStats

Run = Callable[[nn.Module], torch.Tensor]
"""Has a model do the work once, to the end, and returns its answer."""

WARM_RUNS_PER_TURN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Racer:
    """Something to be timed by turns: a model that runs, or else a plain `read`.

    What has no `files` does not depend on the page cache. One that `may_fail` is left out from its first error on.
    """

    name: str
    prepared: Prepared | None = None
    read: Callable[[], object] | None = None
    may_fail: bool = False


@dataclass(slots=True, kw_only=True)
class Turns:
    """What was seen of one racer: seconds of each run in their order, what was cached when runs began, and its stats.

    `stats` are those of the model that ran last, and `timed_forwards` how many of its last forwards were timed.
    """

    seconds: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    stats: RunStats | None = None
    timed_forwards: int = 0
    failure: Exception | None = None

    @property
    def median_seconds(self) -> float:
        """Return the median time of a run."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """What a first, untimed run gave: the answer, on the CPU, and the most memory above what was held before.

    Memory is looked at during a second run of the same model: what only loading took is not in it.
    """

    answer: torch.Tensor
    private_bytes: int
    file_bytes: int


def first_run(prepared: Prepared, run: Run) -> FirstRun:
    """Make a model, have it run twice and let go of it; errors are those of whoever made it."""
    gc.collect()
    before = resident_memory()
    model = prepared.make()
    answer = run(model).detach().to("cpu", copy=True)
    gc.collect()
    held = resident_memory()
    with MemorySampler() as sampler:
        run(model)
    del model
    gc.collect()
    return FirstRun(
        answer=answer,
        private_bytes=max(held.private_bytes - before.private_bytes + sampler.peak.private_bytes, 0),
        file_bytes=max(held.file_bytes - before.file_bytes + sampler.peak.file_bytes, 0),
    )


def take_turns(
    racers: Sequence[Racer],
    run: Run,
    *,
    rounds: int,
    forwards_per_run: int,
    files: Sequence[Path],
    cache: CacheState,
    on_run: OnRun = lambda _words: None,
    clock: Clock = time.perf_counter,
) -> tuple[dict[str, Turns], tuple[LeftInCache, ...]]:
    """Time `rounds` rounds of all `racers`; return what was seen by name, and what could not be evicted.

    The `files` of everyone are dropped from the page cache before each turn of who reads files. Where `cache` is cold,
    one run of a new model is timed then. Else three runs are, after one that is not: it fills the page cache in its own
    way, in small pages or large ones, and what it left there is what the others find.
    """
    seen = {racer.name: Turns() for racer in racers}
    left: dict[str, LeftInCache] = {}
    for number in range(rounds):
        for racer in rotated(racers, number):
            turns = seen[racer.name]
            if turns.failure is not None:
                continue
            on_run(f"{racer.name}: round {number + 1} of {rounds}")
            try:
                stayed = _turn(racer, run, turns, num_forwards=forwards_per_run, files=files, cache=cache, clock=clock)
            except Exception as error:
                if not racer.may_fail:
                    raise
                turns.failure = error.with_traceback(None)  # whose frames would hold memory
                continue
            for file in stayed:
                left[file.file] = max(file, left.get(file.file, file), key=lambda item: item.num_bytes or 0)
    return seen, tuple(left.values())


def _turn(
    racer: Racer,
    run: Run,
    turns: Turns,
    *,
    num_forwards: int,
    files: Sequence[Path],
    cache: CacheState,
    clock: Clock,
) -> tuple[LeftInCache, ...]:
    gc.collect()
    if racer.prepared is None:
        assert racer.read is not None, "a racer runs or reads"
        stayed = evict_verified(files)
        if cache is not CacheState.COLD:
            racer.read()
        began = clock()
        held = racer.read()
        turns.seconds.append(clock() - began)
        del held
        return stayed
    model = racer.prepared.make()
    is_cold = cache is CacheState.COLD and bool(racer.prepared.files)
    stayed = evict_verified(files) if racer.prepared.files else ()
    if not is_cold:
        run(model)
    count = 1 if is_cold else WARM_RUNS_PER_TURN
    for _ in range(count):
        if racer.prepared.files:
            fraction = cached_fraction(racer.prepared.files)
            turns.cached += (0.0, 1.0) if fraction is None else (fraction,)
        began = clock()
        run(model)
        turns.seconds.append(clock() - began)
    turns.stats, turns.timed_forwards = stats_of(model), count * num_forwards
    return stayed


def stats_of(model: nn.Module) -> RunStats | None:
    """Return what a dispatched model did; `None` where nothing streams."""
    stats = getattr(model, "bigload_stats", None)
    return None if stats is None else stats()
