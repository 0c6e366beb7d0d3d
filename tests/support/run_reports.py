"""Run statistics with figures chosen by hand."""

from bigload.generation.report import Answer, Finish, RunReport
from bigload.planning.timing.predict import Prediction
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


def answer(*forwards, seconds=0.5, num_tokens=3, **changes):
    given = {
        "prompt_tokens": 12,
        "tokens": tuple(range(num_tokens)),
        "text": "as if",
        "finish": Finish.END,
        "seconds": seconds,
        "first_token_seconds": seconds / 2,
        "forwards": forwards or None,
    }
    return Answer(**(given | changes))


def run_report(*answers, **changes):
    given = {
        "path": "llama-8b",
        "model_class": "LlamaForCausalLM",
        "total_bytes": 4 * GIB,
        "disk_bytes": 3 * GIB,
        "num_threads": 2,
        "device": "cpu",
        "context": 4096,
        "seed": None,
        "load_seconds": 0.2,
        "peak_private_bytes": 300 * MIB,
        "answers": answers,
    }
    return RunReport(**(given | changes))


def prediction(**changes):
    given = {
        "load_seconds": 0.25,
        "first_token_seconds": 2.5,
        "token_seconds": 0.12,
        "prompt_tokens": 12,
        "batch": 1,
        "bound_by": "memory",
        "profile_name": "this machine",
        "source": "measured",
        "steps": (),
    }
    return Prediction(**(given | changes))
