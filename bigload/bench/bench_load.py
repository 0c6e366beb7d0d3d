"""Profile serial against parallel loading of one checkpoint.

The strategies take turns, in another order each round, so that whatever drifts on the machine hits all alike. A first
round is not timed: it digests what every strategy loaded, which proves that they loaded the same.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.bench.peak_memory import peak_bytes, reset_peak
from bigload.bench.statistics import Ratio, Summary, ratio, summarize
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.loading.load import load
from bigload.loading.page_cache import cached_fraction, evict
from bigload.loading.workers import default_threads, run_jobs

if TYPE_CHECKING:
    import torch

DEFAULT_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyResult:
    """One way to load, measured: seconds of every timed run, the highest memory, a digest of what was loaded."""

    name: str
    threads: int
    seconds: tuple[float, ...]
    peak_bytes: int
    sha256: str

    @property
    def summary(self) -> Summary:
        return summarize(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What was measured, and under which conditions.

    `cached` gives the least and the largest part of the files that was in the page cache when a timed run began.
    """

    path: str
    total_bytes: int
    num_shards: int
    num_cores: int
    runs: int
    cached: tuple[float, float]
    results: tuple[StrategyResult, ...]

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


OnRun = Callable[[str], None]
"""Called with a few words before each run."""


def bench_load(
    checkpoint: Checkpoint | str | Path,
    *,
    threads: Sequence[int] = (1, 2, 4),
    runs: int = DEFAULT_RUNS,
    cold: bool = False,
    on_run: OnRun = lambda _words: None,
    clock: Callable[[], float] = time.perf_counter,
) -> BenchReport:
    """Load `checkpoint` into memory `runs` times with each of the thread counts in `threads`; 1 is serial.

    `cold` drops its files from the page cache before every run. A run ends when every byte is in memory of this
    process; the memory is given back between runs.

    Raises:
        ValueError: no strategy or no run was asked for.
        NotEnoughMemoryError: the checkpoint is larger than the free memory.
    """
    if not threads or runs < 1 or min(threads) < 1:
        raise ValueError("at least one thread count and one run, all of 1 or more")
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    files = [opened.root / shard.file for shard in opened.shards]
    strategies = dict.fromkeys(threads)
    seconds: dict[int, list[float]] = {count: [] for count in strategies}
    peaks = dict.fromkeys(strategies, 0)
    cached: list[float] = []
    digests: dict[int, str] = {}
    for count in strategies:
        on_run(f"{_name(count)}: checking")
        digests[count] = _digest(load(opened, threads=count))
    for run in range(runs):
        for count in _rotated(list(strategies), run):
            on_run(f"{_name(count)}: run {run + 1} of {runs}")
            gc.collect()
            if cold:
                evict(files)
            fraction = cached_fraction(files)
            cached += (0.0, 1.0) if fraction is None else (fraction,)  # unknown: anything between
            reset_peak()
            began = clock()
            tensors = load(opened, threads=count)
            seconds[count].append(clock() - began)
            peaks[count] = max(peaks[count], peak_bytes())
            del tensors
    results = tuple(
        StrategyResult(
            name=_name(count),
            threads=count,
            seconds=tuple(seconds[count]),
            peak_bytes=peaks[count],
            sha256=digests[count],
        )
        for count in strategies
    )
    return BenchReport(
        path=opened.path,
        total_bytes=opened.total_bytes,
        num_shards=len(opened.shards),
        num_cores=len(os.sched_getaffinity(0)),
        runs=runs,
        cached=(min(cached), max(cached)),
        results=results,
    )


def bench_document(report: BenchReport) -> dict[str, object]:
    """Return the report as plain JSON values."""
    return {
        "schema": "bigload.bench-load/1.0",
        "path": report.path,
        "total_bytes": report.total_bytes,
        "num_shards": report.num_shards,
        "num_cores": report.num_cores,
        "runs": report.runs,
        "page_cache": {"state": report.cache_state, "least": report.cached[0], "largest": report.cached[1]},
        "identical": report.is_identical,
        "fastest": report.fastest.name,
        "strategies": [_strategy_document(report, result) for result in report.results],
    }


def _strategy_document(report: BenchReport, result: StrategyResult) -> dict[str, object]:
    summary, times = result.summary, report.ratio_to_fastest(result)
    return {
        "name": result.name,
        "threads": result.threads,
        "run_seconds": list(result.seconds),
        "mean_seconds": summary.mean,
        "stddev_seconds": summary.stddev,
        "min_seconds": summary.minimum,
        "max_seconds": summary.maximum,
        "bytes_per_second": report.total_bytes / summary.mean if summary.mean else None,
        "times_fastest": times.value,
        "times_fastest_error": times.error,
        "peak_bytes": result.peak_bytes,
        "sha256": result.sha256,
    }


def _name(threads: int) -> str:
    return "serial" if threads == 1 else f"parallel, {threads} threads"


def _rotated(items: list[int], by: int) -> list[int]:
    by %= len(items)
    return items[by:] + items[:by]


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of names and bytes, in the order of the names, whatever the order they were loaded in."""
    digests: dict[str, bytes] = {}

    def digest(name: str) -> None:
        tensor = tensors[name]
        num_bytes = tensor.numel() * tensor.element_size()
        memory = (ctypes.c_char * num_bytes).from_address(tensor.data_ptr()) if num_bytes else b""
        digests[name] = hashlib.sha256(memory).digest()

    run_jobs(digest, list(tensors), threads=default_threads())
    return hashlib.sha256(b"".join(name.encode() + digests[name] for name in sorted(tensors))).hexdigest()
