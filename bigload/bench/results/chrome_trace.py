"""Traces of loads and of dispatched models in the Trace Event Format, for chrome://tracing and Perfetto.

Format: "Trace Event Format", Chromium project, the JSON object form with complete ("X") and metadata ("M") events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from bigload.bench.results.result_marks import MADE_BY_BENCH_LOAD, MADE_BY_RUN
from bigload.documents import write_whole
from bigload.machine.threads.activities import Activity
from bigload.runtime.streaming.run_log import RunStats, TraceSpan


class _Timed(Protocol):
    @property
    def thread(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def seconds(self) -> float: ...


_TimedT = TypeVar("_TimedT", bound=_Timed)


def load_trace(activities: Mapping[str, Sequence[Activity]]) -> dict[str, object]:
    """Return the trace of loads by name; times count from the beginning of each load."""

    def described(activity: Activity) -> dict[str, object]:
        args = {"bytes": activity.num_bytes, "file": activity.file}
        return {"name": str(activity.phase), "cat": "load", "args": args}

    return _document(MADE_BY_BENCH_LOAD, activities, described)


def run_trace(models: Mapping[str, RunStats]) -> dict[str, object]:
    """Return the trace of dispatched models by name; times count from the moment a model was dispatched.

    A thread of the caller computes with a block or waits for it; a thread of bigload fetches it.
    """

    def described(span: TraceSpan) -> dict[str, object]:
        args = {"bytes": span.num_bytes, "block": span.name}
        return {"name": f"{span.kind} {span.name or 'model'}", "cat": span.kind, "args": args}

    return _document(MADE_BY_RUN, {name: stats.spans for name, stats in models.items()}, described)


def write_trace(stats: RunStats, path: str | os.PathLike[str], *, name: str = "model") -> None:
    """Write the trace of a dispatched model to a file that chrome://tracing and Perfetto (ui.perfetto.dev) show.

    >>> write_trace(model.bigload_stats(), "trace.json")  # doctest: +SKIP

    Args:
        stats: The result of `model.bigload_stats()`.
        path: The file; an existing one is replaced.
        name: The name of the model in the trace.

    Raises:
        WriteError: the system refused.
    """
    write_whole(Path(path), json.dumps(run_trace({name: stats})))


def _document(
    made_by: str, processes: Mapping[str, Sequence[_TimedT]], described: Callable[[_TimedT], dict[str, object]]
) -> dict[str, object]:
    """Return a document with one process for each name and one row for each of its threads."""
    events: list[dict[str, object]] = []
    for process, (name, timed) in enumerate(processes.items(), start=1):
        rows = {thread: row for row, thread in enumerate(dict.fromkeys(each.thread for each in timed), start=1)}
        events.append(_metadata("process_name", name, process, 0))
        events += [_metadata("thread_name", thread, process, row) for thread, row in rows.items()]
        events += [
            {
                **described(each),
                "ph": "X",
                "ts": each.start * 1e6,  # microseconds
                "dur": each.seconds * 1e6,
                "pid": process,
                "tid": rows[each.thread],
            }
            for each in timed
        ]
    return {"otherData": {"made_by": made_by}, "displayTimeUnit": "ms", "traceEvents": events}


def _metadata(kind: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
