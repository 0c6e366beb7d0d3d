"""What a dispatched model did, as a trace for chrome://tracing or Perfetto: computing, waiting and fetching by rows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from bigload.documents import write_whole
from bigload.runtime.streaming.run_log import RunStats

TRACED_BY = "bigload run"
"""By this a trace of a run is known, and may be replaced by another."""


def run_trace(models: Mapping[str, RunStats]) -> dict[str, object]:
    """Return the Trace Event Format of what models did, by name: a process each, and a row for every thread.

    A row shows the blocks of the model one after the other, each named with what was done: a thread of the caller
    computes with a block or waits for it, one of bigload's fetches it. Times are in microseconds since the model was
    dispatched. Format: "Trace Event Format", Chromium project, the JSON object form with complete ("X") and metadata
    ("M") events.
    """
    events: list[dict[str, object]] = []
    for process, (name, stats) in enumerate(models.items(), start=1):
        rows = {thread: row for row, thread in enumerate(dict.fromkeys(span.thread for span in stats.spans), start=1)}
        events.append(_named("process_name", name, process, 0))
        events += [_named("thread_name", thread, process, row) for thread, row in rows.items()]
        events += [
            {
                "name": f"{span.kind} {span.name or 'model'}",
                "cat": span.kind,
                "ph": "X",
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "pid": process,
                "tid": rows[span.thread],
                "args": {"bytes": span.num_bytes, "block": span.name},
            }
            for span in stats.spans
        ]
    return {"otherData": {"made_by": TRACED_BY}, "displayTimeUnit": "ms", "traceEvents": events}


def write_trace(stats: RunStats, path: str | os.PathLike[str], *, name: str = "model") -> None:
    """Write what a model did to a file that chrome://tracing and Perfetto (ui.perfetto.dev) show.

    >>> write_trace(model.bigload_stats(), "trace.json")  # doctest: +SKIP

    Args:
        stats: What `model.bigload_stats()` gave.
        path: The file; what stands there is replaced.
        name: What the model is called in the picture.

    Raises:
        WriteError: the system refused.
    """
    write_whole(Path(path), json.dumps(run_trace({name: stats})))


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
