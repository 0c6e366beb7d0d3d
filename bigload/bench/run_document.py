"""Reports of runs as plain JSON values: `bigload.bench-run/1.0` and `bigload.run-stats/1.0`."""

from __future__ import annotations

from bigload.bench.run_report import ReadResult, RunReport, RunResult
from bigload.bench.run_stats import RunStatsReport
from bigload.bench.statistics import summarize
from bigload.runtime.streaming.run_log import ForwardStats

BENCH_RUN = "bigload.bench-run/1.0"
RUN_STATS = "bigload.run-stats/1.0"


def bench_run_document(report: RunReport) -> dict[str, object]:
    """Return the report for `--json`; spans are not in it."""
    return {
        "schema": BENCH_RUN,
        "path": report.path,
        "model_class": report.model_class,
        "total_bytes": report.total_bytes,
        "disk_bytes": report.disk_bytes,
        "streamed_bytes": report.streamed_bytes,
        "num_threads": report.num_threads,
        "load_average": report.load_average,
        "device": report.device,
        "dtype": report.dtype,
        "tokens": report.tokens,
        "new_tokens": report.new_tokens,
        "rounds": report.rounds,
        "page_cache": {
            "asked": str(report.cache),
            "state": report.cache_state,
            "least": report.cached[0],
            "largest": report.cached[1],
            "not_evicted": [
                {"file": left.file, "left_bytes": left.num_bytes, "reason": left.reason}
                for left in report.left_in_cache
            ],
        },
        "identical": report.is_identical,
        "compute_seconds": report.compute_seconds,
        "read_seconds": report.read_seconds,
        "bound_seconds": report.bound_seconds,
        "results": [_of_result(report, result) for result in report.results],
        "raw_reads": [_of_read(read) for read in report.reads],
        "forwards": [_of_forward(forward) for forward in report.forwards],
        "warnings": [{"code": warning.code, "text": warning.text} for warning in report.warnings],
    }


def run_stats_document(report: RunStatsReport) -> dict[str, object]:
    """Return what `run-stats --json` prints; `forwards` is null where nothing streams."""
    return {
        "schema": RUN_STATS,
        "path": report.path,
        "model_class": report.model_class,
        "total_bytes": report.total_bytes,
        "disk_bytes": report.disk_bytes,
        "num_threads": report.num_threads,
        "device": report.device,
        "tokens": report.tokens,
        "load_seconds": report.load_seconds,
        "run_seconds": list(report.seconds),
        "forwards": None if report.stats is None else [_of_forward(forward) for forward in report.stats.forwards],
    }


def _of_result(report: RunReport, result: RunResult) -> dict[str, object]:
    summary = summarize(result.seconds) if result.seconds else None
    median, plain, bound = result.median_seconds, report.compute_seconds, report.bound_seconds
    return {
        "name": result.name,
        "package": result.package,
        "version": result.version,
        "problem": result.problem,
        "identical": result.is_identical,
        "identical_within_rounding": result.is_within_rounding,
        "max_difference": result.max_difference,
        "run_seconds": list(result.seconds),
        "median_seconds": median,
        "min_seconds": None if summary is None else summary.minimum,
        "max_seconds": None if summary is None else summary.maximum,
        "tokens_per_second": report.tokens_per_second(result),
        "times_plain": median / plain if median and plain else None,
        "times_bound": median / bound if median and bound else None,
        "peak_private_bytes": result.private_bytes,
        "peak_file_bytes": result.file_bytes,
    }


def _of_read(read: ReadResult) -> dict[str, object]:
    return {
        "name": read.read.name,
        "kind": str(read.read.kind),
        "threads": read.read.threads,
        "run_seconds": list(read.seconds),
        "median_seconds": read.median_seconds,
    }


def _of_forward(forward: ForwardStats) -> dict[str, object]:
    return {
        "run_seconds": forward.seconds,
        "disk_read_bytes": forward.bytes_from_disk,
        "ram_read_bytes": forward.bytes_from_ram,
        "wait_seconds": forward.wait_seconds,
        "fetch_seconds": forward.fetch_seconds,
        "overlap": forward.overlap,
        "peak_weight_bytes": forward.peak_bytes,
    }
