import os
import signal
import sys
import threading
from collections import Counter

import pytest

from bigload.machine.threads.thread_pool import (
    MAX_DEFAULT_THREADS,
    PoolStoppedError,
    abandonable,
    default_threads,
    run_jobs,
)
from builders import no_thread_left

many_threads = pytest.mark.parametrize("threads", [2, 3, 8])
any_threads = pytest.mark.parametrize("threads", [1, 2, 3, 8])


class WorkerError(Exception):
    pass


@pytest.fixture(autouse=True)
def threads_end():
    with no_thread_left():
        yield


@any_threads
def test_every_job_is_done_once(threads):
    done, lock = Counter(), threading.Lock()

    def work(job):
        with lock:
            done[job] += 1

    run_jobs(work, range(500), threads=threads)
    assert done == Counter(range(500))


@any_threads
def test_no_jobs_are_no_work(threads):
    run_jobs(lambda job: pytest.fail("there is nothing to do"), [], threads=threads)


def test_one_thread_is_the_callers_own():
    seen = set()
    run_jobs(lambda job: seen.add(threading.current_thread()), range(3), threads=1)
    assert seen == {threading.current_thread()}


@many_threads
def test_as_many_threads_as_asked_for_work_at_the_same_time(threads):
    together = threading.Barrier(threads, timeout=30)
    run_jobs(lambda job: together.wait(), range(threads), threads=threads)


@any_threads
def test_jobs_start_in_their_order(threads):
    started = []

    def jobs():
        for number in range(200):
            started.append(number)
            yield number

    run_jobs(lambda job: None, jobs(), threads=threads)
    assert started == list(range(200))


@any_threads
@pytest.mark.parametrize("kind", [WorkerError, KeyboardInterrupt, SystemExit, MemoryError])
def test_an_error_in_a_job_is_raised_in_the_caller(threads, kind):
    raised = kind("job 3")

    def work(job):
        if job == 3:
            raise raised

    with pytest.raises(kind) as caught:
        run_jobs(work, range(10), threads=threads)
    assert caught.value is raised


@many_threads
def test_the_first_of_several_errors_wins(threads):
    runs_first, both_run = [], threading.Barrier(2, timeout=30)

    def work(job):
        if job == 0:
            runs_first.append(threading.current_thread())
            both_run.wait()
            raise WorkerError("first")
        both_run.wait()
        runs_first[0].join(30)
        raise WorkerError("second")

    with pytest.raises(WorkerError, match="first"):
        run_jobs(work, range(2), threads=threads)


def test_running_jobs_are_waited_for_and_no_more_are_started_after_an_error():
    fails, both_run, started, finished = [], threading.Barrier(2, timeout=30), [], []

    def work(job):
        started.append(job)
        if job == 0:
            fails.append(threading.current_thread())
            both_run.wait()
            raise WorkerError
        both_run.wait()
        fails[0].join(30)
        finished.append(job)

    with pytest.raises(WorkerError):
        run_jobs(work, range(1000), threads=2)
    assert (sorted(started), finished) == ([0, 1], [1])


@many_threads
def test_an_error_while_the_next_job_is_made_is_raised_in_the_caller(threads):
    def jobs():
        yield 1
        raise WorkerError("no second job")

    with pytest.raises(WorkerError, match="no second job"):
        run_jobs(lambda job: None, jobs(), threads=threads)


@many_threads
def test_all_threads_have_ended_after_the_last_job(threads):
    run_jobs(lambda job: None, range(20), threads=threads)


@many_threads
def test_threads_that_cannot_be_started_leave_none_running(threads, monkeypatch):
    start, started = threading.Thread.start, []

    def start_one(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start"):
        run_jobs(lambda job: None, range(20), threads=threads)


@any_threads
def test_a_stop_iteration_in_a_job_is_an_error_and_not_the_end_of_the_work(threads):
    def work(job):
        if job == 3:
            next(iter(()))

    with pytest.raises((StopIteration, RuntimeError)):
        run_jobs(work, range(10), threads=threads)


@pytest.fixture
def hears_interrupts():
    """As in a terminal: a shell has programs that it starts in the background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_a_real_interrupt_waits_for_the_running_jobs():
    main, both_run = threading.main_thread().ident, threading.Barrier(2, timeout=30)
    returned, ended, was_overtaken = threading.Event(), threading.Event(), []

    def place_of_main():
        frame = sys._current_frames()[main]
        return frame.f_code.co_filename, frame.f_lasti

    def wait_until_main_waits():
        places = []
        while len(places) < 30 or len(set(places[-30:])) > 1:
            places.append(place_of_main())
            returned.wait(0.001)

    def work(job):
        both_run.wait()
        if threading.current_thread().name == "bigload-0":  # the first that is waited for
            wait_until_main_waits()
            signal.pthread_kill(main, signal.SIGINT)
            was_overtaken.append(returned.wait(0.2))  # nobody sets it while this job is waited for
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        run_jobs(work, range(2), threads=2)
    returned.set()
    assert ended.wait(30)
    assert was_overtaken == [False]


@pytest.mark.usefixtures("hears_interrupts")
def test_a_second_interrupt_waits_as_well_while_the_next_job_is_made():
    main, is_making, returned = threading.main_thread().ident, threading.Event(), threading.Event()
    was_overtaken = []

    def jobs():
        yield 0
        is_making.set()
        for _ in range(3):
            signal.pthread_kill(main, signal.SIGINT)
            was_overtaken.append(returned.wait(0.1))

    def work(job):
        is_making.wait(30)

    with pytest.raises(KeyboardInterrupt):
        run_jobs(work, jobs(), threads=2)
    returned.set()
    assert was_overtaken == [False] * 3


def test_the_default_is_one_thread_per_usable_core_and_four_at_most(monkeypatch):
    for cores, threads in ((1, 1), (3, 3), (64, MAX_DEFAULT_THREADS)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        assert default_threads() == threads
    assert MAX_DEFAULT_THREADS == 4


@pytest.mark.parametrize("threads", [0, -3])
def test_less_than_one_thread_is_refused(threads):
    with pytest.raises(ValueError, match="expected 1 or more"):
        run_jobs(print, [1], threads=threads)


def test_a_thread_that_may_be_abandoned_is_not_waited_for_and_goes_no_further():
    is_waiting, go_on, ended = threading.Event(), threading.Event(), []

    def work(job):
        if job:
            is_waiting.wait(30)
            raise WorkerError
        try:
            with abandonable():
                is_waiting.set()
                go_on.wait(30)
            ended.append("went on")
        except PoolStoppedError:
            ended.append("stopped")
            raise

    with pytest.raises(WorkerError):
        run_jobs(work, range(2), threads=2)
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("bigload-"):
            thread.join(30)
    assert ended == ["stopped"]


def test_waiting_for_others_is_nothing_special_outside_of_a_pool():
    with abandonable():
        pass
