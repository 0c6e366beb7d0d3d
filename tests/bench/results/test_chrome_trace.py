"""Traces of loads and runs are in the format that chrome://tracing and Perfetto read."""

import json

import pytest

from bigload import run_trace, write_trace
from bigload.bench.results.chrome_trace import load_trace
from bigload.errors import WriteError
from bigload.machine.threads.activities import Activity, Phase
from run_reports import spans, stats_of


def complete(trace):
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_every_span_is_an_event_in_microseconds():
    events = complete(run_trace({"model": stats_of(spans=spans())}))
    assert [event["name"] for event in events] == [
        "wait layers.0",
        "compute layers.0",
        "fetch layers.1",
        "compute layers.1",
    ]
    assert [event["ts"] for event in events] == pytest.approx([0, 10_000, 20_000, 60_000])
    assert [event["dur"] for event in events] == pytest.approx([10_000, 50_000, 30_000, 50_000])
    assert events[2]["args"] == {"bytes": 7, "block": "layers.1"}


def test_a_thread_is_a_row_with_its_name_and_a_model_a_process():
    trace = run_trace({"a": stats_of(spans=spans()), "b": stats_of(spans=spans()[:1])})
    named = {
        (event["pid"], event["tid"], event["args"]["name"]) for event in trace["traceEvents"] if event["ph"] == "M"
    }
    assert named == {(1, 0, "a"), (1, 1, "MainThread"), (1, 2, "fetcher"), (2, 0, "b"), (2, 1, "MainThread")}
    assert [(event["pid"], event["tid"]) for event in complete(trace)] == [(1, 1), (1, 1), (1, 2), (1, 1), (2, 1)]


def test_reading_is_beside_computing_and_events_of_a_row_follow_each_other():
    events = complete(run_trace({"model": stats_of(spans=spans())}))
    fetch = next(event for event in events if event["cat"] == "fetch")
    computing = [event for event in events if event["cat"] == "compute"]
    assert any(
        each["tid"] != fetch["tid"]
        and each["ts"] < fetch["ts"] + fetch["dur"]
        and fetch["ts"] < each["ts"] + each["dur"]
        for each in computing
    )


def test_what_has_no_name_is_the_model_itself():
    (event,) = complete(run_trace({"m": stats_of(spans=[spans()[0].__class__(**fields(spans()[0], name=""))])}))
    assert event["name"] == "wait model"


def fields(span, **changes):
    return {name: getattr(span, name) for name in ("kind", "name", "thread", "start", "seconds")} | changes


def test_a_trace_is_written_as_json_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "t.json"
    path.write_text("before")
    write_trace(stats_of(spans=spans()), path, name="llama")
    assert json.loads(path.read_text()) == run_trace({"llama": stats_of(spans=spans())})


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(WriteError, match="nowhere"):
        write_trace(stats_of(), tmp_path / "nowhere" / "t.json")


def activity(phase, seconds, *, thread="bigload-0", start=0.0, num_bytes=0):
    return Activity(phase=phase, thread=thread, start=start, seconds=seconds, num_bytes=num_bytes, file="a.safetensors")


def test_a_trace_has_a_process_for_every_load_and_a_row_for_every_thread():
    done = [
        activity(Phase.READ, 0.5, start=1.0, num_bytes=7),
        activity(Phase.COPY, 0.25, thread="bigload-1", start=1.5),
    ]
    document = load_trace({"read, 2 threads": done, "mmap, 1 thread": done[:1]})
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
