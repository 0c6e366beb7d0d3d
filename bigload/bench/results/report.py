"""Results of `bench-load` as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bigload.bench.cases import LoadCase
from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.page_cache_state import CacheState, LeftInCache
from bigload.bench.raw_limit import RawRead
from bigload.bench.results.recommendation import Recommendation
from bigload.bench.results.statistics import Ratio, Summary, ratio, summarize
from bigload.bench.runner import Measured
from bigload.loading.report import LoadReport
from bigload.loading.settings import Method
from bigload.machine.threads.activities import Activity, Phase


@dataclass(frozen=True, slots=True)
class BenchWarning:
    """A stable `code`, and a sentence that names the option that helps, if there is one."""

    code: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """Measurements of one case.

    Attributes:
        case: The case as requested.
        method: The I/O method used; the choice of `auto`.
        reason: Reason for the choice, as half a sentence.
        memory: The memory that the tensors end in.
        measured: Seconds and memory of all timed runs.
        sha256: Digest of the names and bytes that were loaded.
        limit: Name of the raw read that bounds such a load; `None` where none could be measured.
        phases: Shares of threads × wall time in a traced load after the timed runs; empty without a trace.
        activities: The activities of that load, thread by thread.
    """

    case: LoadCase
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
    """Measurements of a raw read of the same bytes."""

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
    """Measurements of another loader, or the reason why there are none.

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
    """All measurements of a bench and their conditions.

    Attributes:
        path: The checkpoint path as given.
        total_bytes: Bytes of its files that are read; shared bytes count once.
        is_remote: Whether they come over a network, so that the page cache has no part in it.
        cache: The page cache state before every run.
        cached: The least and the largest cached share of the files at the start of a run.
        left_in_cache: Files that could not be evicted.
        load_average: The load average over the minute before the bench; `None` if unknown.
        results: One result per case, in the order requested.
        raw: Raw reads of the same bytes.
        peers: Other loaders, if requested.
        recommendation: The strategy to use.
        warnings: Reasons to distrust the figures.
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
    is_remote: bool = False
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
    def seconds(self) -> Mapping[str, tuple[float, ...]]:
        """Seconds of every run of each case and each peer, by name."""
        ours = {result.name: result.seconds for result in self.results}
        return ours | {peer.name: peer.measured.seconds for peer in self.peers if peer.measured is not None}

    @property
    def is_identical(self) -> bool:
        return len({result.sha256 for result in self.results}) == 1

    @property
    def fastest(self) -> StrategyResult:
        return min(self.results, key=lambda result: result.summary.mean)

    def ratio_to_fastest(self, result: StrategyResult) -> Ratio:
        """Return how many times longer `result` took than the fastest."""
        return ratio(result.summary, self.fastest.summary)

    def part_of_limit(self, result: StrategyResult | PeerResult) -> float | None:
        """Return the rate of `result` as a share of its raw read's, `None` without one.

        Medians are compared: one disturbed run of three makes means meaningless.
        """
        raw = next((raw for raw in self.raw if raw.name == result.limit), None)
        if raw is None or result.measured is None or not result.measured.median_seconds:
            return None
        return raw.measured.median_seconds / result.measured.median_seconds


def phase_shares(report: LoadReport) -> dict[Phase, float]:
    """Return the share of threads × wall time that each phase took; they add up to 1, empty without a trace.

    Time that no activity covers counts as waiting: for another thread, the interpreter, a first or last block.
    """
    seconds = report.phase_seconds
    if not seconds:
        return {}
    whole = max(report.threads * report.seconds, sum(seconds.values()))
    shares: dict[Phase, float] = {phase: seconds.get(phase, 0.0) / whole for phase in Phase if phase != Phase.WAIT}
    shares[Phase.WAIT] = max(0.0, 1 - sum(shares.values()))
    return shares
