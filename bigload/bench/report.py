"""What a bench found, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bigload.bench.bench_warnings import BenchWarning
from bigload.bench.cases import Case
from bigload.bench.memory import MemoryKind
from bigload.bench.page_cache_state import CacheState, LeftInCache
from bigload.bench.raw_limit import RawRead
from bigload.bench.recommendation import Recommendation
from bigload.bench.runner import Measured
from bigload.bench.statistics import Ratio, Summary, ratio, summarize
from bigload.loading.methods import Method
from bigload.loading.report import Activity, Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """One way to load, measured.

    Attributes:
        case: What was asked for.
        method: How the bytes were read; what `auto` chose.
        reason: Why so, as half a sentence.
        memory: Where the tensors end.
        measured: Seconds and memory of all timed runs.
        sha256: Digest of the names and bytes that were loaded.
        limit: Name of the raw read that is the limit for such a load; `None` where it could not be measured.
        phases: Parts of threads × wall time in a traced load that came after the timed runs; empty without a trace.
        activities: What that load did, thread by thread.
    """

    case: Case
    method: Method
    reason: str
    memory: MemoryKind
    measured: Measured
    sha256: str
    limit: str | None = None
    phases: Mapping[Phase, float] = field(default_factory=dict)
    activities: tuple[Activity, ...] = ()

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def threads(self) -> int:
        return self.case.threads

    @property
    def seconds(self) -> tuple[float, ...]:
        return self.measured.seconds

    @property
    def summary(self) -> Summary:
        return summarize(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawResult:
    """A raw read of the same bytes, measured by turns with the loads."""

    read: RawRead
    measured: Measured

    @property
    def name(self) -> str:
        return self.read.name

    @property
    def summary(self) -> Summary:
        return summarize(self.measured.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """Another loader: measured, or why it was not.

    `measured` is `None` together with a `problem`: it is not installed (then `version` is `None`), not made for this
    checkpoint, or failed. `is_identical` says whether it loaded the same names and bytes as bigload.
    """

    name: str
    package: str
    version: str | None
    memory: MemoryKind
    measured: Measured | None = None
    is_identical: bool | None = None
    limit: str | None = None
    problem: str | None = None

    @property
    def summary(self) -> Summary | None:
        return None if self.measured is None else summarize(self.measured.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What was measured, and under which conditions.

    Attributes:
        path: The checkpoint as it was named.
        total_bytes: Bytes of its files that are read: what tensors share counts once.
        cache: What the page cache was brought to before every run.
        cached: The least and the largest part of the files that was in it when a timed run began.
        left_in_cache: What could not be evicted.
        load_average: Processes that wanted a core when the bench began, over the last minute; `None` if unknown.
        results: Every strategy in the order in which they were asked for.
        raw: Raw reads of the same bytes.
        peers: Other loaders, if they were asked for.
        recommendation: What to use.
        warnings: What stands in the way of trusting the figures.
    """

    path: str
    total_bytes: int
    num_shards: int
    num_cores: int
    runs: int
    device: str
    dtype: str | None
    cache: CacheState
    cached: tuple[float, float]
    results: tuple[StrategyResult, ...]
    left_in_cache: tuple[LeftInCache, ...] = ()
    load_average: float | None = None
    raw: tuple[RawResult, ...] = ()
    peers: tuple[PeerResult, ...] = ()
    recommendation: Recommendation | None = None
    warnings: tuple[BenchWarning, ...] = ()

    @property
    def cache_state(self) -> str:
        """Return `cold`, `warm`, or `mixed` where it was neither at every start."""
        least, largest = self.cached
        return "cold" if largest < 0.01 else "warm" if least > 0.99 else "mixed"

    @property
    def is_identical(self) -> bool:
        """Whether all strategies loaded the same bytes."""
        return len({result.sha256 for result in self.results}) == 1

    @property
    def fastest(self) -> StrategyResult:
        return min(self.results, key=lambda result: result.summary.mean)

    def ratio_to_fastest(self, result: StrategyResult) -> Ratio:
        """Return how many times longer `result` took than the fastest."""
        return ratio(result.summary, self.fastest.summary)

    def part_of_limit(self, result: StrategyResult | PeerResult) -> float | None:
        """Return the rate of `result` as a part of the raw read's, `None` where there is nothing to compare.

        It is that of the medians: one disturbed run of three would make nonsense of means.
        """
        raw = next((raw for raw in self.raw if raw.name == result.limit), None)
        if raw is None or result.measured is None or not result.measured.median_seconds:
            return None
        return raw.measured.median_seconds / result.measured.median_seconds
