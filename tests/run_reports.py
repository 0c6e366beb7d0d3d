"""Reports of runs that never were, with figures chosen by hand."""

from bigload.bench.bench_warnings import BenchWarning
from bigload.bench.page_cache_state import CacheState
from bigload.bench.raw_limit import RawKind, RawRead
from bigload.bench.run_report import ReadResult, RunReport, RunResult
from bigload.bench.run_stats import RunStatsReport
from bigload.runtime.streaming.run_log import ForwardStats, RunStats, Span

GIB, MIB = 2**30, 2**20


def forward(seconds=0.24, *, disk=0, ram=3 * GIB, wait=0.03, fetch=0.2):
    return ForwardStats(
        seconds=seconds,
        bytes_from_disk=disk,
        bytes_from_ram=ram,
        wait_seconds=wait,
        fetch_seconds=fetch,
        peak_bytes=400 * MIB,
    )


def stats_of(*forwards, spans=()):
    return RunStats(forwards=forwards, num_forwards=len(forwards), spans=spans)


def spans():
    """Two blocks: one computes while the other is fetched by another thread."""
    return (
        Span(kind="wait", name="layers.0", thread="MainThread", start=0.0, seconds=0.01),
        Span(kind="compute", name="layers.0", thread="MainThread", start=0.01, seconds=0.05),
        Span(kind="fetch", name="layers.1", thread="fetcher", start=0.02, seconds=0.03, num_bytes=7),
        Span(kind="compute", name="layers.1", thread="MainThread", start=0.06, seconds=0.05),
    )


def result(name, *seconds, **changes):
    given = {"name": name, "seconds": seconds, "is_identical": True, "is_within_rounding": True, "max_difference": 0.0}
    return RunResult(**(given | changes))


def reads(*seconds, kind=RawKind.MAP):
    return (ReadResult(read=RawRead(kind, 2), seconds=seconds), ReadResult(read=RawRead(kind, 4), seconds=(9.0,)))


def run_report(*results, **changes):
    given = {
        "path": "llama-8b",
        "model_class": "LlamaForCausalLM",
        "total_bytes": 4 * GIB,
        "disk_bytes": 3 * GIB,
        "streamed_bytes": 3 * GIB,
        "num_threads": 2,
        "device": "cpu",
        "dtype": "bfloat16",
        "tokens": 1,
        "new_tokens": 0,
        "rounds": 3,
        "cache": CacheState.WARM,
        "cached": (1.0, 1.0),
        "results": results,
    }
    return RunReport(**(given | changes))


def full_run_report(**changes):
    """Everyone is there: one failed, one gave another answer, one is not installed."""
    given = {
        "reads": reads(0.25, 0.24, 0.26),
        "stats": stats_of(forward(9.0), forward(), forward()),
        "timed_forwards": 2,
        "warnings": (BenchWarning("noisy", "runs differ by up to 20% (plain)"),),
    }
    return run_report(
        result("plain", 0.19, 0.2, 0.21, private_bytes=4 * GIB),
        result("bigload", 0.24, 0.25, 0.26, private_bytes=20 * MIB, file_bytes=400 * MIB),
        result("accelerate", 0.6, 0.61, 0.7, package="accelerate", version="1.15.0", private_bytes=500 * MIB),
        result(
            "transformers",
            *(0.4, 0.41, 0.42),
            package="transformers",
            version="5.23.0",
            is_identical=False,
            is_within_rounding=False,
            max_difference=0.25,
        ),
        RunResult(name="other", package="other", problem="not installed"),
        RunResult(name="failing", package="failing", version="2", problem="OSError: \x1b[2J"),
        **(given | changes),
    )


def stats_report(*forwards, seconds=(0.5, 0.25), **changes):
    given = {
        "path": "llama-8b",
        "model_class": "LlamaForCausalLM",
        "total_bytes": 4 * GIB,
        "disk_bytes": 3 * GIB,
        "num_threads": 2,
        "device": "cpu",
        "tokens": 1,
        "load_seconds": 0.2,
        "seconds": seconds,
        "stats": stats_of(*forwards) if forwards else None,
    }
    return RunStatsReport(**(given | changes))
