import threading

import pytest

from bigload.loading.inflight_bytes import InflightBytes
from bigload.loading.report import Phase, Recorder


def test_who_finds_no_room_waits_until_there_is_some_and_the_wait_is_noted():
    inflight, recorder, order = InflightBytes(10), Recorder(is_tracing=True), []

    def second():
        with inflight.hold(4, recorder):
            order.append("second")

    thread = threading.Thread(target=second)
    with inflight.hold(7, recorder):
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert [activity.phase for activity in recorder.activities()] == [Phase.WAIT]


def test_what_is_larger_than_the_bound_goes_alone():
    inflight, recorder = InflightBytes(10), Recorder(is_tracing=True)
    with inflight.hold(1000, recorder):
        pass
    with inflight.hold(3, recorder), inflight.hold(7, recorder):
        pass
    assert recorder.activities() == ()


def test_bytes_are_given_back_after_an_error():
    inflight, recorder = InflightBytes(10), Recorder(is_tracing=True)
    with pytest.raises(ZeroDivisionError), inflight.hold(10, recorder):
        raise ZeroDivisionError
    with inflight.hold(10, recorder):
        pass
    assert recorder.activities() == ()
