"""Pools of processes: whatever happens to one, nobody waits for ever, and nothing is left behind."""

import gc
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from bigload.errors import WorkerError, WorkerTimeoutError
from bigload.parallel.workers import pool as pool_module
from bigload.parallel.workers import worker_process
from bigload.parallel.workers.messages import pack
from bigload.parallel.workers.pool import WorkerPool
from process_census import census, ended, is_running, run_program, settled

BOOT = worker_process._BOOT.replace("bigload.parallel.workers.worker_main", "pool_worker")
SOON = 60
"""Seconds that even a machine that stands still for a while does not need; workers that sleep do so for 100."""


@pytest.fixture(autouse=True)
def without_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert BOOT != worker_process._BOOT
    monkeypatch.setattr(worker_process, "_BOOT", BOOT)
    monkeypatch.setattr(pool_module, "GRACE_SECONDS", 0.3)


@pytest.fixture
def pool():
    made = WorkerPool(2, environment={"OF_WORKERS_ALONE": "yes"})
    yield made
    made.end("the test is over")


def ask(pool, told, **options):
    return pool.ask(pack(told), told, **options)


def test_answers_come_in_the_order_of_ranks(pool):
    assert ask(pool, "rank") == [0, 1]


def test_workers_have_variables_that_this_process_has_not(pool):
    before = dict(os.environ)
    assert ask(pool, "environment")[1] == {"RANK": "1", "LOCAL_RANK": "1", "OF_WORKERS_ALONE": "yes"}
    assert dict(os.environ) == before


def test_workers_have_the_descriptors_of_their_own_connection_only(pool):
    standard, connection, of_listing = 3, 1, 1
    assert ask(pool, "descriptors") == [standard + connection + of_listing] * 2


@pytest.mark.parametrize(("word", "ending"), [("exit", "exit code 9"), ("kill", "SIGKILL"), ("abort", "SIGABRT")])
def test_a_worker_that_dies_is_told_and_the_others_are_ended(pool, word, ending):
    process_ids = pool.process_ids
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker 1 ended with {ending} while {word} 1") as caught:
        ask(pool, f"{word} 1")
    assert time.monotonic() - began < SOON
    assert caught.value.rank == 1
    assert ("going" in caught.value.log) == (word == "exit")
    assert not any(map(is_running, process_ids))


def test_a_worker_killed_while_it_starts_is_told():
    began = time.monotonic()
    pool = WorkerPool(2, environment={})
    os.kill(pool.process_ids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 0 ended with SIGKILL while rank"):
        ask(pool, "rank")
    assert time.monotonic() - began < SOON


def test_a_worker_killed_from_outside_in_the_middle_of_work_is_told(pool):
    ask(pool, "rank")
    victim = pool.process_ids[1]
    threading.Timer(0.1, os.kill, (victim, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL"):
        ask(pool, "sleep")
    assert time.monotonic() - began < 0.1 + SOON


def test_a_worker_that_was_killed_before_is_told_when_the_pool_is_closed():
    pool = WorkerPool(2, environment={})
    ask(pool, "rank")
    process_ids = pool.process_ids
    os.kill(process_ids[1], signal.SIGKILL)
    ended(process_ids[1:])
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL while stopping"):
        pool.close()
    assert time.monotonic() - began < SOON
    assert not any(map(is_running, process_ids))
    pool.close()  # again, which is nothing to tell


def test_workers_that_do_not_stop_are_ended():
    deaf = WorkerPool(2, environment={"deaf": "yes"})
    ask(deaf, "rank")
    process_ids = deaf.process_ids
    deaf.close()
    assert not any(map(is_running, process_ids))


def test_what_all_raise_leaves_them_as_they_are(pool):
    with pytest.raises(WorkerError, match="worker 0 raised ValueError while fail: no") as caught:
        ask(pool, "fail")
    assert caught.value.is_shared
    assert "in line 0" in str(caught.value)
    assert ask(pool, "rank") == [0, 1]


@pytest.mark.parametrize("told", ["fail 1", "fail_apart"])
def test_what_not_all_raise_ends_them(pool, told):
    process_ids = pool.process_ids
    with pytest.raises(WorkerError, match="other workers did not raise it") as caught:
        ask(pool, told)
    assert caught.value.rank == (1 if told == "fail 1" else 0)
    assert not any(map(is_running, process_ids))
    with pytest.raises(WorkerError, match="raised ValueError"):
        ask(pool, "rank")


def test_who_does_not_answer_in_time_is_ended_and_told_with_its_stack(pool):
    ask(pool, "rank")
    process_ids = pool.process_ids
    with pytest.raises(WorkerTimeoutError, match="no answer of worker 1 within") as caught:
        pool.ask(pack("rank 0"), "working", timeout=2.0)  # in which the other answers
    assert "wait_for_others" in caught.value.stacks[1]
    assert not any(map(is_running, process_ids))


def test_who_goes_on_when_another_has_finished_is_given_up(pool, monkeypatch):
    monkeypatch.setattr(pool_module, "LAG_SECONDS", 0.2)
    with pytest.raises(WorkerTimeoutError, match="no answer of worker 1"):
        ask(pool, "rank 0")


def test_threads_take_turns(pool):
    found = []
    threads = [threading.Thread(target=lambda: found.append(ask(pool, "rank"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[0, 1]] * 8


def test_an_interrupt_ends_the_workers(pool):
    process_ids = pool.process_ids
    with pytest.raises(KeyboardInterrupt):
        ask(pool, "interrupt 1")
    assert not any(map(is_running, process_ids))
    with pytest.raises(WorkerError, match="KeyboardInterrupt"):
        ask(pool, "rank")


def test_workers_that_cannot_be_started_leave_nothing(monkeypatch):
    monkeypatch.setattr(worker_process, "get_executable", lambda: "/nowhere/python")
    before = census()
    with pytest.raises(OSError, match="nowhere"):
        WorkerPool(2, environment={})
    assert settled(before) == before


@pytest.mark.parametrize("ending", ["close", pytest.param("end", marks=pytest.mark.slow), "forget", "die"])
def test_nothing_is_left_behind(ending):
    before = census()
    for _ in range(2):
        pool = WorkerPool(2, environment={})
        ask(pool, "rank")
        assert census() != before
        if ending == "close":
            pool.close()
        elif ending == "end":
            pool.end("of no more use")
        elif ending == "die":
            with pytest.raises(WorkerError):
                ask(pool, "kill 0")
        del pool
        gc.collect()
        assert settled(before) == before


def test_what_a_worker_writes_is_kept_and_the_end_of_it_told(pool):
    ask(pool, "talk")
    logs = pool.logs()
    assert [log.splitlines()[-1] for log in logs] == ["I am 0", "I am 1"]
    assert all(len(log) <= 65536 for log in logs)


def in_a_process(act):
    """Fork, start a pool there, and call `act` with it; return the processes of its workers when the fork has ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            pool = WorkerPool(2, environment={})
            ask(pool, "rank")
            os.write(writing, " ".join(map(str, pool.process_ids)).encode())
            os.close(writing)
            act(pool)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = [int(text) for text in pipe.read().split()]
    os.waitpid(child, 0)
    assert len(found) == 2
    return found


def kill_myself(pool):
    os.kill(os.getpid(), signal.SIGKILL)


def kill_myself_while_they_work(pool):
    threading.Timer(0.1, kill_myself, (pool,)).start()
    ask(pool, "sleep")


def kill_myself_and_leave_a_fork(pool):
    if os.fork() == 0:
        time.sleep(3)
        os._exit(0)
    kill_myself(pool)


@pytest.mark.parametrize(
    "act",
    [pytest.param(kill_myself, marks=pytest.mark.slow), kill_myself_while_they_work, kill_myself_and_leave_a_fork],
)
def test_workers_end_when_the_process_that_started_them_is_killed(act):
    assert ended(in_a_process(act))


PROGRAM = """
import sys
from bigload.parallel.workers import worker_process
from bigload.parallel.workers.messages import pack
from bigload.parallel.workers.pool import WorkerPool
worker_process._BOOT = {boot!r}
pool = WorkerPool(2, environment={{}}, daemon={daemon})
pool.ask(pack("rank"), "rank")
print(*pool.process_ids, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("daemon", [True, False])
@pytest.mark.parametrize("then", ["", "raise ValueError", "sys.exit(3)"])
def test_workers_end_when_the_interpreter_that_started_them_does(then, daemon):
    program = PROGRAM.format(boot=BOOT, daemon=daemon) + then
    run = run_program(program)
    assert run.returncode == {"": 0, "raise ValueError": 1, "sys.exit(3)": 3}[then], run.stderr
    process_ids = [int(text) for text in run.stdout.split()]
    assert len(process_ids) == 2
    assert ended(process_ids)


def test_a_fork_has_no_workers_and_does_them_no_harm(pool):
    ask(pool, "rank")
    child = os.fork()
    if child == 0:
        try:
            ask(pool, "rank")
        except WorkerError as error:
            pool.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(pool, "rank") == [0, 1]


def test_a_process_that_a_worker_has_forked_does_not_hide_its_death(pool):
    forked = ask(pool, "fork")
    began = time.monotonic()
    with pytest.raises(WorkerError):
        ask(pool, "kill 1")
    assert time.monotonic() - began < SOON
    for process_id in forked:
        os.kill(process_id, signal.SIGKILL)


def test_the_folder_of_the_script_does_not_go_before_the_standard_library(tmp_path, monkeypatch):
    Path(tmp_path, "json.py").write_text("raise SystemExit('this is not json')")
    monkeypatch.chdir(tmp_path)
    pool = WorkerPool(1, environment={})
    assert ask(pool, "rank") == [0]
    pool.close()


STOPPED = """
import os, signal, sys
from bigload.parallel.workers import worker_process
worker_process._BOOT = sys.argv[1]
from bigload.parallel.workers.messages import pack
from bigload.parallel.workers.pool import WorkerPool
pool = WorkerPool(1, environment={})
pool.ask(pack("rank"), "answering")
(worker,) = pool.process_ids
os.kill(worker, signal.SIGSTOP)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_stopped_worker_dies_with_its_parent():
    parent = run_program(STOPPED, BOOT)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    worker = int(parent.stdout)
    has_ended = ended([worker], within=10)
    if not has_ended:
        os.kill(worker, signal.SIGKILL)
    assert has_ended


def test_workers_outlive_the_thread_that_asked_for_them():
    made = []
    thread = threading.Thread(target=lambda: made.append(WorkerPool(2, environment={})))
    thread.start()
    thread.join()
    (pool,) = made
    assert ask(pool, "rank") == [0, 1]
    pool.close()  # which raises if one was killed


def test_a_forked_process_starts_workers_of_its_own(pool):
    assert ask(pool, "rank") == [0, 1]
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        other = WorkerPool(1, environment={})
        os._exit(0 if ask(other, "rank") == [0] else 1)
    assert os.waitpid(child, 0)[1] == 0
