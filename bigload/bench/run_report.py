"""What `bench-run` found, as values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bigload.bench.bench_warnings import BenchWarning
from bigload.bench.page_cache_state import CacheState, LeftInCache
from bigload.bench.raw_limit import RawRead
from bigload.runtime.streaming.run_log import ForwardStats, RunStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One contender: measured, or why it was not.

    Attributes:
        name: `plain` is the model in memory without hooks, `bigload` the one that is dispatched by it.
        package: What pip calls it; `None` for those two.
        version: `None` where it is not installed.
        seconds: Of every timed run; empty together with a `problem`.
        is_identical: Whether it gave the same answer as the first of all, to the last bit.
        is_within_rounding: Whether it gave the same answer but for the last bits, which depend on the order of sums.
        max_difference: The largest difference of two numbers in the answers; `None` where they cannot be compared.
        private_bytes: The most memory of its own above what was held before the model was made.
        file_bytes: The most pages of files above what was mapped before.
    """

    name: str
    package: str | None = None
    version: str | None = None
    seconds: tuple[float, ...] = ()
    is_identical: bool | None = None
    is_within_rounding: bool | None = None
    max_difference: float | None = None
    private_bytes: int = 0
    file_bytes: int = 0
    problem: str | None = None

    @property
    def median_seconds(self) -> float | None:
        """Return the median time of a run, which a single disturbed run does not move; `None` if it never ran."""
        return statistics.median(self.seconds) if self.seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """A raw read of all bytes that the plan has on the disk, by turns with the runs."""

    read: RawRead
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Return the median time."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What was measured, and under which conditions.

    Attributes:
        path: The model as it was named.
        model_class: Its class in transformers.
        total_bytes: Bytes of all its tensors.
        disk_bytes: Those that the plan has on the disk.
        streamed_bytes: What bigload brought in for a run, in the middle; `None` where nothing streams.
        num_threads: Threads that torch computes with.
        device: Where it runs.
        dtype: What its parameters are, as torch calls it.
        tokens: Length of what it was given.
        new_tokens: How many were decoded after that; 0 for single forwards.
        rounds: Turns of each.
        cache: What the page cache was brought to.
        cached: The least and the largest part of its files that was in it when a timed run began.
        left_in_cache: What could not be evicted.
        load_average: Processes that wanted a core when the bench began; `None` if unknown.
        results: Everyone, in a fixed order.
        reads: Raw reads of what is on the disk.
        stats: What bigload's last model did.
        timed_forwards: How many of its last forwards were timed.
        warnings: What stands in the way of trusting the figures.
    """

    path: str
    model_class: str
    total_bytes: int
    disk_bytes: int
    streamed_bytes: int | None
    num_threads: int
    device: str
    dtype: str
    tokens: int
    new_tokens: int
    rounds: int
    cache: CacheState
    cached: tuple[float, float]
    results: tuple[RunResult, ...]
    left_in_cache: tuple[LeftInCache, ...] = ()
    load_average: float | None = None
    reads: tuple[ReadResult, ...] = ()
    stats: RunStats | None = None
    timed_forwards: int = 0
    warnings: tuple[BenchWarning, ...] = ()

    @property
    def cache_state(self) -> str:
        """Return `cold`, `warm`, or `mixed` where it was neither at every start."""
        least, largest = self.cached
        return "cold" if largest < 0.01 else "warm" if least > 0.99 else "mixed"

    @property
    def is_identical(self) -> bool:
        """Whether everyone who ran gave the same answer."""
        return all(result.is_identical is not False for result in self.results)

    def result(self, name: str) -> RunResult | None:
        """Return what was seen of `name`; `None` if there is no such contender."""
        return next((result for result in self.results if result.name == name), None)

    @property
    def result_of_bigload(self) -> RunResult:
        """Return what was seen of bigload, which always runs."""
        return next(result for result in self.results if result.name == "bigload")

    @property
    def compute_seconds(self) -> float | None:
        """Return what a run takes with everything in memory; `None` where that was not measured."""
        plain = self.result("plain")
        return None if plain is None else plain.median_seconds

    @property
    def read_seconds(self) -> float | None:
        """Return what the bytes that bigload brought in take to be read, and nothing else: at the best raw rate.

        From a cold cache that is everything on the disk, once: what is decoded after that finds it in memory.
        """
        best = min((read.median_seconds for read in self.reads), default=None)
        if best is None or self.cache is CacheState.COLD:
            return best
        return best * (self.streamed_bytes or 0) / self.disk_bytes if self.disk_bytes else 0.0

    @property
    def bound_seconds(self) -> float | None:
        """Return the time that no run can beat, the longer of computing and reading; `None` if neither is known."""
        return max((each for each in (self.compute_seconds, self.read_seconds) if each is not None), default=None)

    @property
    def forwards(self) -> Sequence[ForwardStats]:
        """Return what bigload saw of its last timed forwards."""
        return () if self.stats is None else self.stats.forwards[-self.timed_forwards :]

    def tokens_per_second(self, result: RunResult) -> float | None:
        """Return the rate of decoding; `None` where nothing was decoded."""
        median = result.median_seconds
        return self.new_tokens / median if self.new_tokens and median else None
