import json

import pytest

from bigload.bench.phases import chrome_trace, phase_shares
from bigload.loading.methods import Method
from bigload.loading.report import Activity, LoadReport, Phase


def activity(phase, seconds, *, thread="bigload-0", start=0.0, num_bytes=0):
    return Activity(phase=phase, thread=thread, start=start, seconds=seconds, num_bytes=num_bytes, file="a.safetensors")


def report(*activities, threads=2, seconds=10.0):
    return LoadReport(
        method=Method.READ,
        reason="",
        threads=threads,
        max_inflight_bytes=1,
        read_bytes=1,
        tensor_bytes=1,
        seconds=seconds,
        activities=activities,
    )


def test_shares_are_parts_of_threads_times_wall_time_and_the_rest_is_waiting():
    found = phase_shares(report(activity(Phase.READ, 8.0), activity(Phase.READ, 6.0), activity(Phase.FAULT, 2.0)))
    assert found[Phase.READ] == pytest.approx(0.7)
    assert found[Phase.FAULT] == pytest.approx(0.1)
    assert found[Phase.WAIT] == pytest.approx(0.2)
    assert sum(found.values()) == pytest.approx(1)


def test_waiting_that_was_noted_is_not_counted_twice():
    found = phase_shares(report(activity(Phase.READ, 10.0), activity(Phase.WAIT, 6.0)))
    assert found[Phase.WAIT] == pytest.approx(0.5)


def test_threads_beside_the_readers_do_not_make_more_than_all():
    found = phase_shares(report(*(activity(Phase.COPY, 10.0) for _ in range(4))))
    assert found[Phase.COPY] == pytest.approx(1)
    assert found[Phase.WAIT] == pytest.approx(0)


def test_a_load_without_a_trace_has_no_shares():
    assert phase_shares(report()) == {}


def test_a_trace_has_a_process_for_every_load_and_a_row_for_every_thread():
    done = [
        activity(Phase.READ, 0.5, start=1.0, num_bytes=7),
        activity(Phase.COPY, 0.25, thread="bigload-1", start=1.5),
    ]
    document = chrome_trace({"read, 2 threads": done, "mmap, 1 thread": done[:1]})
    assert json.loads(json.dumps(document)) == document
    events = document["traceEvents"]
    assert [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"] == [
        (1, "read, 2 threads"),
        (2, "mmap, 1 thread"),
    ]
    assert [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"] == [
        (1, 1, "bigload-0"),
        (1, 2, "bigload-1"),
        (2, 1, "bigload-0"),
    ]
    assert next(e for e in events if e["ph"] == "X") == {
        "name": "read",
        "cat": "load",
        "ph": "X",
        "ts": 1_000_000.0,
        "dur": 500_000.0,
        "pid": 1,
        "tid": 1,
        "args": {"bytes": 7, "file": "a.safetensors"},
    }
