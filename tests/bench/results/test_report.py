import pytest

from bigload.bench.results.report import phase_shares
from bigload.loading.report import LoadReport
from bigload.loading.settings import Method
from bigload.machine.threads.activities import Activity, Phase


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
