import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bigload.machine.threads import core_permits
from bigload.machine.threads.core_permits import CorePermits


@pytest.fixture
def permits(monkeypatch):
    """Permits of a machine with two cores."""
    monkeypatch.setattr(core_permits, "usable_cores", lambda: 2)
    return CorePermits()


def test_as_many_threads_compute_at_a_time_as_there_are_cores(permits):
    lock, both = threading.Lock(), threading.Barrier(2)
    now, most = 0, 0

    def work(_):
        nonlocal now, most
        with permits.computing():
            with lock:
                now += 1
                most = max(most, now)
            both.wait(timeout=30)  # two are there, or this fails
            with lock:
                now -= 1

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(12)))
    assert most == 2


def test_who_waits_for_a_disk_lets_another_compute_meanwhile(permits):
    with permits.computing(), permits.computing(), permits.waiting(), ThreadPoolExecutor(1) as pool:

        def compute():
            with permits.computing():
                return True

        assert pool.submit(compute).result(timeout=30)


def test_waiting_without_a_permit_takes_and_gives_none(permits):
    for _ in range(3):
        with permits.waiting():
            pass
    with permits.computing(), permits.computing():
        assert not permits._permits.acquire(blocking=False)


def test_errors_give_permits_back(permits):
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), permits.computing(), permits.waiting():
            1 / 0  # noqa: B018 - it is an error
    with permits.computing(), permits.computing():
        pass
