"""Where a traced load spent the time of its threads, and the same as a trace for chrome://tracing or Perfetto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bigload.loading.report import Activity, LoadReport, Phase

MADE_BY = "bigload bench-load"
"""By this a file of ours is known, and may be replaced by another."""


def phase_shares(report: LoadReport) -> dict[Phase, float]:
    """Return which part of threads × wall time each phase took; they add up to 1, empty for a load without a trace.

    What no activity covers is waiting: for another thread, for the interpreter, for a first or last block.
    """
    seconds = report.phase_seconds
    if not seconds:
        return {}
    whole = max(report.threads * report.seconds, sum(seconds.values()))
    shares: dict[Phase, float] = {phase: seconds.get(phase, 0.0) / whole for phase in Phase if phase != Phase.WAIT}
    shares[Phase.WAIT] = max(0.0, 1 - sum(shares.values()))
    return shares


def chrome_trace(activities: Mapping[str, Sequence[Activity]]) -> dict[str, object]:
    """Return the Trace Event Format of loads by name: a process each, a row for every thread, phases as their names.

    Times are in microseconds from the beginning of the load. Format: "Trace Event Format", Chromium project, the JSON
    object form with complete ("X") and metadata ("M") events.
    """
    events: list[dict[str, object]] = []
    for process, (name, done) in enumerate(activities.items(), start=1):
        threads = {thread: row for row, thread in enumerate(dict.fromkeys(a.thread for a in done), start=1)}
        events.append(_named("process_name", name, process, 0))
        events += [_named("thread_name", thread, process, row) for thread, row in threads.items()]
        events += [
            {
                "name": str(activity.phase),
                "cat": "load",
                "ph": "X",
                "ts": activity.start * 1e6,
                "dur": activity.seconds * 1e6,
                "pid": process,
                "tid": threads[activity.thread],
                "args": {"bytes": activity.num_bytes, "file": activity.file},
            }
            for activity in done
        ]
    return {"otherData": {"made_by": MADE_BY}, "displayTimeUnit": "ms", "traceEvents": events}


def _named(kind: str, name: str, process: int, thread: int) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
