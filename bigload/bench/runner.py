"""Rounds of timed runs, the only place of the bench that reads the clock.

Contenders run in rotating order, so that a drift of the machine affects all alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

from bigload.bench.fresh_memory import renew
from bigload.bench.page_cache_state import CacheState, LeftInCache, prepare
from bigload.machine.files.page_cache import cached_fraction
from bigload.machine.memory.process_memory import MemorySampler, ResidentMemory, peak_bytes, reset_peak, trim_heap

Item = TypeVar("Item")

OnRun = Callable[[str], None]
"""Called with a short text before each run."""

Clock = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One thing to be timed; `run` returns what holds its result, and ends when every byte of that can be used.

    Attributes:
        may_fail: An error of it excludes it from later rounds; the error of another contender ends the bench.
        warm_ups: Untimed runs per round, before the timed ones.
        repeats: Timed runs per round.
    """

    name: str
    run: Callable[[], object]
    may_fail: bool = False
    warm_ups: int = 0
    repeats: int = 1

    @contextmanager
    def turn(self) -> Iterator[Callable[[], object]]:
        """Yield the function to time in one round; subclasses build and release untimed state around it."""
        yield self.run


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of one contender over all its runs.

    Attributes:
        seconds: Time of each run, in order.
        peak_bytes: The largest resident set of the whole process.
        peak_private_bytes: The most private memory above that before a run.
        peak_file_bytes: The most mapped file pages above those before a run.
        cached: The least and the largest share of the files in the page cache at the start of a run; 0 to 1 where
            the kernel does not report it.
    """

    seconds: tuple[float, ...]
    peak_bytes: int = 0
    peak_private_bytes: int = 0
    peak_file_bytes: int = 0
    cached: tuple[float, float] = (0.0, 1.0)

    @property
    def median_seconds(self) -> float:
        """Return the median time of a run, which a single disturbed run does not move."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Measurements and errors by name of the contender, and what could not be evicted, the worst of each file."""

    measured: dict[str, Measured]
    failures: dict[str, BaseException]
    left_in_cache: tuple[LeftInCache, ...]


class _Run(NamedTuple):
    seconds: float
    cached: float | None
    peak_bytes: int
    use: ResidentMemory


def run_rounds(
    contenders: Sequence[Contender],
    *,
    runs: int,
    files: Sequence[Path],
    cache: CacheState = CacheState.AS_IS,
    renewed_bytes: int = 0,
    on_run: OnRun = lambda _words: None,
    clock: Clock = time.perf_counter,
) -> Outcome:
    """Time `runs` rounds of all `contenders`.

    Before each turn the allocator gives back what it keeps, the page cache of `files` is brought into the state
    `cache`, and `renewed_bytes` of free memory are touched (`fresh_memory`): about as much as a run takes.
    """
    timed: dict[str, list[_Run]] = {contender.name: [] for contender in contenders}
    failures: dict[str, BaseException] = {}
    left: dict[str, LeftInCache] = {}
    for number in range(runs):
        for contender in rotated(contenders, number):
            if contender.name in failures:
                continue
            on_run(f"{contender.name}: run {number + 1} of {runs}")
            trim_heap(collect_garbage=True)  # else the allocator may hold all that a load needs, of one before
            try:
                with contender.turn() as run:
                    for stayed in prepare(files, cache):
                        least = left.get(stayed.file, stayed)
                        left[stayed.file] = max(stayed, least, key=lambda item: item.num_bytes or 0)
                    renew(renewed_bytes)
                    for _ in range(contender.warm_ups):
                        run()
                    for _ in range(contender.repeats):
                        timed[contender.name].append(_time(run, files, clock))
                    del run  # the next contender starts without its memory
            except Exception as error:
                if not contender.may_fail:
                    raise
                failures[contender.name] = error.with_traceback(None)  # whose frames would hold memory
    measured = {name: _measured(each) for name, each in timed.items() if name not in failures and each}
    return Outcome(measured=measured, failures=failures, left_in_cache=tuple(left.values()))


def rotated(items: Sequence[Item], by: int) -> list[Item]:
    """Return `items` beginning with the one at position `by`, the others in turn, backwards every second time.

    So none always runs after the same other one, and in the memory which that one gave back.

    >>> rotated("abc", 4), rotated("abc", 5)
    (['b', 'c', 'a'], ['c', 'b', 'a'])
    """
    step = -1 if by % 2 else 1
    return [items[(by + step * place) % len(items)] for place in range(len(items))]


def _time(run: Callable[[], object], files: Sequence[Path], clock: Clock) -> _Run:
    cached = cached_fraction(files)
    reset_peak()
    sampler = MemorySampler()
    with sampler:
        began = clock()
        held = run()
        seconds = clock() - began
        peak = peak_bytes()
    del held  # freed only now: freeing is not part of a load
    return _Run(seconds, cached, peak, sampler.peak)


def _measured(runs: Sequence[_Run]) -> Measured:
    cached = [share for run in runs for share in ((0.0, 1.0) if run.cached is None else (run.cached,))]
    return Measured(
        seconds=tuple(run.seconds for run in runs),
        peak_bytes=max(run.peak_bytes for run in runs),
        peak_private_bytes=max(run.use.private_bytes for run in runs),
        peak_file_bytes=max(run.use.file_bytes for run in runs),
        cached=(min(cached), max(cached)),
    )
