"""Run statistics with figures chosen by hand."""

from bigload.bench.run_stats import RunStatsReport
from bigload.runtime.streaming.run_log import ForwardStats, RunStats, TraceSpan

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
        TraceSpan(kind="wait", name="layers.0", thread="MainThread", start=0.0, seconds=0.01),
        TraceSpan(kind="compute", name="layers.0", thread="MainThread", start=0.01, seconds=0.05),
        TraceSpan(kind="fetch", name="layers.1", thread="fetcher", start=0.02, seconds=0.03, num_bytes=7),
        TraceSpan(kind="compute", name="layers.1", thread="MainThread", start=0.06, seconds=0.05),
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
