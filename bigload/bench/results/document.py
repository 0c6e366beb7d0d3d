"""The report of `bench-load` as plain JSON values: `bigload.bench-load/1.1`."""

from __future__ import annotations

from bigload.bench.results.recommendation import Recommendation
from bigload.bench.results.report import BenchReport, PeerResult, RawResult, StrategyResult
from bigload.bench.results.statistics import summarize
from bigload.bench.runner import Measured
from bigload.documents import fields


def bench_document(report: BenchReport) -> dict[str, object]:
    """Return the report for `--json`; traces are not in it, but their sums are."""
    return {
        "schema": "bigload.bench-load/1.1",
        **fields(report, "path", "total_bytes", "num_shards", "num_cores", "load_average", "runs", "device", "dtype"),
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
        "fastest": report.fastest.name,
        "strategies": [_of_strategy(report, result) for result in report.results],
        "raw_reads": [_of_raw(report, result) for result in report.raw],
        "peers": [_of_peer(report, result) for result in report.peers],
        "recommendation": None if report.recommendation is None else _of_recommendation(report.recommendation),
        "warnings": [{"code": warning.code, "text": warning.text} for warning in report.warnings],
    }


def _of_strategy(report: BenchReport, result: StrategyResult) -> dict[str, object]:
    times = report.ratio_to_fastest(result)
    return {
        **fields(result, "name", "threads"),
        "method": str(result.case.method),
        "used_method": str(result.method),
        "reason": result.reason,
        "memory": str(result.memory),
        "max_inflight_bytes": result.case.max_inflight,
        **_of_measured(result.measured, report.total_bytes),
        "times_fastest": times.value,
        "times_fastest_error": times.error,
        "raw_read": result.limit,
        "part_of_raw_read": report.part_of_limit(result),
        "phases": {str(phase): part for phase, part in result.phases.items()},
        "sha256": result.sha256,
    }


def _of_raw(report: BenchReport, result: RawResult) -> dict[str, object]:
    return {
        "name": result.name,
        "kind": str(result.read.kind),
        "threads": result.read.threads,
        **_of_measured(result.measured, report.total_bytes),
    }


def _of_peer(report: BenchReport, result: PeerResult) -> dict[str, object]:
    return {
        **fields(result, "name", "package", "version"),
        "memory": str(result.memory),
        "problem": result.problem,
        "identical": result.is_identical,
        "raw_read": result.limit,
        "part_of_raw_read": report.part_of_limit(result),
        "measured": None if result.measured is None else _of_measured(result.measured, report.total_bytes),
    }


def _of_measured(measured: Measured, total_bytes: int) -> dict[str, object]:
    summary = summarize(measured.seconds)
    return {
        "run_seconds": list(measured.seconds),
        "mean_seconds": summary.mean,
        "stddev_seconds": summary.stddev,
        "median_seconds": measured.median_seconds,
        "min_seconds": summary.minimum,
        "max_seconds": summary.maximum,
        "bytes_per_second": total_bytes / summary.mean if summary.mean else None,
        **fields(measured, "peak_bytes", "peak_private_bytes", "peak_file_bytes"),
    }


def _of_recommendation(advice: Recommendation) -> dict[str, object]:
    return {
        **fields(advice, "strategy", "threads", "method"),
        "parallel_pays_from_bytes": advice.pays_from_bytes,
        "sizes": [
            {
                "total_bytes": size.num_bytes,
                **fields(size, "serial_seconds", "parallel_seconds"),
            }
            for size in advice.sizes
        ],
    }
