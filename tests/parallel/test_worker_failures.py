"""Workers that fail, die, hang or are interrupted in the middle of a collective: told at once, nobody left."""

import gc
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

import bigload
from bigload.errors import WorkerError, WorkerTimeoutError
from bigload.parallel.workers import pool
from process_census import census, ended, is_running, run_program, settled
from worker_models import Deadly, Unbuildable

X = torch.ones(4)
EXAMPLE = {"x": X}
SOON = 60
"""Seconds that even a machine that stands still for a while does not need; workers that sleep do so for 100."""


@pytest.fixture
def spread(tmp_path, monkeypatch):
    """A function that gives a model with workers; after the test, nothing of them may be left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(pool, "GRACE_SECONDS", 1.0)
    gc.collect()
    before = census()
    made = []

    def spread(num_workers=2, model=None, **options):
        model = Deadly() if model is None else model
        made.append(bigload.parallelize(model, num_workers, backend="gloo", example=EXAMPLE, **options))
        return model, made[-1]

    yield spread
    for parallel in made:
        parallel.deparallelize()
        if not parallel.model.weight.is_meta:
            assert torch.equal(parallel.model(X), X)
    made.clear()
    del parallel
    gc.collect()
    assert settled(before) == before


@pytest.mark.slow
def test_a_worker_killed_in_the_middle_of_a_forward_is_told_and_nothing_is_left(spread, tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file(Deadly().state_dict(), checkpoint)
    with bigload.init_empty_weights():
        model = Deadly()
    model, parallel = spread(model=model, checkpoint=checkpoint)
    assert all(worker.read_bytes == X.nbytes for worker in parallel.report.workers)
    process_ids = parallel.process_ids
    assert torch.equal(model(X), 2 * X)
    with pytest.raises(WorkerError, match="this is wrong") as caught:
        model(X, "fail")
    assert caught.value.is_shared
    assert torch.equal(model(X), 2 * X)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL while running forward") as caught:
        model(X, "kill", rank=1)
    assert time.monotonic() - began < SOON
    assert (caught.value.rank, caught.value.exit_code) == (1, -signal.SIGKILL)
    assert not any(map(is_running, process_ids))
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL"):
        model(X)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_any_of_four_may_die(spread, rank):
    model, _ = spread(4)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=f"worker {rank} ended with exit code 3"):
        model(X, "leave", rank=rank)
    assert time.monotonic() - began < SOON


@pytest.mark.slow
def test_what_one_worker_raises_while_others_wait_for_it_is_told(spread):
    model, parallel = spread()
    process_ids = parallel.process_ids
    with pytest.raises(WorkerError, match="worker 1 raised ValueError while running forward: this is wrong") as caught:
        model(X, "fail", rank=1)
    assert "worker_models.py" in caught.value.worker_traceback
    assert not any(map(is_running, process_ids))


@pytest.mark.slow
def test_who_hangs_is_told_with_the_places_of_all(spread):
    model, parallel = spread(timeout=3.0)  # in which the one reaches what the other never does
    process_ids = parallel.process_ids
    with pytest.raises(WorkerTimeoutError, match="no answer of workers 0, 1 within") as caught:
        model(X, "sleep", rank=1)
    assert "all_reduce" in caught.value.stacks[0]
    assert "in sleep" in caught.value.stacks[1]
    assert not any(map(is_running, process_ids))


@pytest.mark.slow
def test_an_interrupt_in_the_middle_of_a_collective_ends_the_workers(spread):
    model, parallel = spread()
    process_ids = parallel.process_ids
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        model(X, "interrupt", rank=1)
    assert time.monotonic() - began < SOON
    assert not any(map(is_running, process_ids))
    with pytest.raises(WorkerError, match="KeyboardInterrupt"):
        model(X)


@pytest.mark.slow
def test_a_worker_killed_between_calls_is_told_by_the_next_one_or_when_the_model_is_given_back(spread):
    model, parallel = spread()
    os.kill(parallel.process_ids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="worker 0 ended with SIGKILL"):
        model(X)
    other, parallel = spread()
    os.kill(parallel.process_ids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL while stopping"):
        other.deparallelize()
    assert time.monotonic() - began < SOON
    assert torch.equal(other(X), X)


@pytest.mark.slow
def test_a_worker_killed_while_it_starts_is_told(spread, monkeypatch):
    spread()  # one whole start, so that the census is that of an ordinary program
    started = pool.WorkerPool.ask

    def kill_then_ask(self, *args, **options):
        threading.Timer(0.5, os.kill, (self.process_ids[1], signal.SIGKILL)).start()
        return started(self, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(pool.WorkerPool, "ask", kill_then_ask)
        with pytest.raises(WorkerError, match="worker 1 ended with SIGKILL while starting"):
            bigload.parallelize(Deadly(), 2, backend="gloo", example=EXAMPLE)


@pytest.mark.slow
def test_a_start_that_takes_too_long_is_given_up(spread):
    with pytest.raises(WorkerTimeoutError, match="while starting"):
        spread(start_timeout=0.2)
    spread()


@pytest.mark.slow
def test_what_a_worker_raises_while_it_starts_is_told(spread):
    spread()
    with pytest.raises(WorkerError, match="raised OSError while starting: no such thing here"):
        bigload.parallelize(Unbuildable(), 2, backend="gloo", example=EXAMPLE)


PARENT = """
import os, signal, threading, torch, bigload
from worker_models import Deadly
model = Deadly()
parallel = bigload.parallelize(model, 2, backend="gloo", example={"x": torch.ones(4)})
print(*parallel.process_ids, flush=True)
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
model(torch.ones(4), "sleep", rank=1)
"""


@pytest.mark.slow
def test_workers_end_when_their_starter_is_killed_while_one_waits_in_a_collective():
    parent = run_program(PARENT)
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    process_ids = [int(text) for text in parent.stdout.split()]
    assert len(process_ids) == 2
    assert ended(process_ids, within=SOON)
