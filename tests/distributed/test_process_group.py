"""Processes that work together: what each says all hear, and no failure leaves another waiting."""

import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from patience import ends, wait_for_line
from reserved_ports import reserved_port

import bigload
from bigload.distributed.joining import current_process_group, launched_process_group
from bigload.distributed.process_group import SingleProcess, run_on_all_ranks, to_json
from bigload.distributed.torch_process_group import _from_json
from bigload.errors import RankError, ReadError
from thread_process_groups import outcomes

SCENES = """
import json, os, signal, sys, threading
import torch.distributed as dist
from bigload.errors import RankError
from bigload.distributed.joining import current_process_group, launched_process_group
from bigload.distributed.process_group import run_on_all_ranks
from bigload.distributed.torch_process_group import LISTENER_THREAD_PREFIX
from bigload.distributed.torch_process_group import TorchProcessGroup

class Loaded:
    def __reduce__(self):
        return os._exit, (99,)  # what unpickling would run, in all others

said = {}
with launched_process_group() as team:
    rank = team.rank
    said["shared"] = team.all_gather({"rank": rank, "padding": "x" * 100_000 * rank})[1]["rank"]
    said["none"] = team.all_gather(None)
    try:
        team.all_gather(Loaded())
    except TypeError:
        said["refused"] = True
    try:
        run_on_all_ranks(team, lambda: 1 // (1 - rank))
    except RankError as error:
        said["error"] = [error.rank, error.reason]
    except ZeroDivisionError:
        said["error"] = "mine"
    said["after"] = team.all_gather(rank)
said["ours is gone"] = not dist.is_initialized()

store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
with current_process_group() as team:
    said["present"] = [type(team) is TorchProcessGroup, team.all_gather(rank)]
everybody = [None, None]
dist.all_gather_object(everybody, rank)
said["theirs works"] = everybody

def interrupt():  # what a Ctrl-C does to who waits for an answer
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)

try:
    with current_process_group() as team:
        if rank == 0:
            interrupt()
        else:
            store.wait(["interrupted"])
        team.all_gather(rank)
except KeyboardInterrupt:
    store.set("interrupted", "yes")
    said["interrupted"] = True
except RankError as error:
    said["interrupted"] = error.rank == 0
said["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith(LISTENER_THREAD_PREFIX)]
with current_process_group() as team:
    said["again"] = team.all_gather(rank)

with current_process_group() as team:
    if rank == 1:
        print(json.dumps(said), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        team.all_gather(rank)
    except RankError as error:
        said["gone"] = (error.rank, error.reason)
print(json.dumps(said), flush=True)
"""

INTERRUPTED = """
import sys
from bigload.distributed.joining import launched_process_group

with launched_process_group() as team:
    team.all_gather(None)
    try:
        print("waiting", flush=True)  # from now on it may be interrupted
        if team.rank == 0:
            sys.stdin.readline()  # busy with its share
            sys.exit()
        team.all_gather(None)
    except KeyboardInterrupt:
        sys.exit(130)
"""


@contextmanager
def started(program, size):
    """Yield processes of `program`, which may have one more server at the port that is its argument."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as opened:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(Path(bigload.__file__).parents[1]), os.environ.get("PYTHONPATH", ""))),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(opened.enter_context(reserved_port())),
        }
        command = [sys.executable, "-c", program, str(opened.enter_context(reserved_port()))]
        processes = []
        for rank in range(size):
            process = subprocess.Popen(command, env={**environment, "RANK": str(rank)}, **pipes)
            processes.append(opened.enter_context(process))
            opened.callback(process.kill)
        yield processes


def test_without_a_launcher_one_works_alone():
    with launched_process_group() as team:
        assert (team.rank, team.size, team.all_gather("x")) == (0, 1, ["x"])


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "1", "RANK": "0"}, {"WORLD_SIZE": "4"}])
def test_one_rank_and_a_size_without_a_rank_are_alone(launched_by, environment):
    launched_by(**environment)
    with launched_process_group() as team:
        assert isinstance(team, SingleProcess)


def test_a_launcher_that_says_nonsense_is_named(launched_by):
    launched_by(WORLD_SIZE=2, RANK=0)
    with (
        pytest.raises(RankError, match=r"cannot join the 2 of this job: .*MASTER_ADDR") as caught,
        launched_process_group(),
    ):
        pass
    assert "torchrun" in caught.value.hint


def test_without_a_process_group_a_library_call_is_alone():
    with current_process_group() as team:
        assert isinstance(team, SingleProcess)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_together_returns_what_each_did_itself(size):
    assert outcomes(size, lambda team: run_on_all_ranks(team, lambda: team.rank)) == list(range(size))


@pytest.mark.parametrize(("size", "failing"), [(1, 0), (2, 0), (2, 1), (3, 1)])
def test_a_failure_is_raised_where_it_was_and_named_elsewhere(size, failing):
    def work(team):
        def step():
            if team.rank == failing:
                raise ReadError("model.safetensors", "it ended")

        run_on_all_ranks(team, step)

    for rank, outcome in enumerate(outcomes(size, work)):
        if rank == failing:
            assert isinstance(outcome, ReadError)
        else:
            assert isinstance(outcome, RankError)
            assert (outcome.rank, outcome.reason) == (failing, "ReadError: cannot read model.safetensors: it ended")


def test_an_error_about_another_process_goes_on_naming_that_one():
    def work(team):
        def step():
            if team.rank == 0:
                raise RankError(2, "it is on fire")

        run_on_all_ranks(team, step)

    assert [(error.rank, error.reason) for error in outcomes(3, work)] == [(2, "it is on fire")] * 3


def test_the_own_error_is_raised_also_if_nobody_is_left_to_hear_it():
    def work(team):
        if team.rank == 0:
            return
        run_on_all_ranks(team, lambda: 1 // 0)

    assert isinstance(outcomes(2, work)[1], ZeroDivisionError)


@pytest.mark.parametrize("value", [(1, 2), {1: "x"}, {"x"}, b"x", object()])
def test_what_json_would_change_is_not_shared(value):
    with pytest.raises(TypeError):
        to_json({"value": value})


def test_what_a_peer_sends_is_not_unpickled():
    with pytest.raises(RankError, match="process 1 failed: it sent 5 bytes that are not JSON"):
        _from_json(1, pickle.dumps(None) + b".")


@pytest.mark.slow
def test_real_processes_share_fail_together_and_notice_a_kill():
    with started(SCENES, 2) as (first, second):
        (output, errors), (other_output, other_errors) = ends([first, second])
    assert (first.returncode, second.returncode) == (0, -signal.SIGKILL), errors + other_errors
    heard, other = json.loads(output), json.loads(other_output)
    rank, reason = heard.pop("gone")
    assert rank == 1
    assert "can no longer be reached" in reason
    assert heard.pop("error")[0] == 1
    assert other.pop("error") == "mine"
    assert heard == other
    assert heard == {
        "shared": 1,
        "none": [None, None],
        "refused": True,
        "after": [0, 1],
        "ours is gone": True,
        "present": [True, [0, 1]],
        "theirs works": [0, 1],
        "interrupted": True,
        "threads": [],
        "again": [0, 1],
    }


@pytest.mark.slow
def test_ctrl_c_ends_who_waits_and_then_the_others_although_one_is_busy():
    with started(INTERRUPTED, 4) as processes:
        wait_for_line(processes, "waiting")
        processes[1].send_signal(signal.SIGINT)
        ends([processes[1]])
        assert processes[1].returncode == 130
        others = processes[2:]  # not neighbours of it, and the first still works
        told = [errors for _, errors in ends(others)]
        assert 0 not in [process.returncode for process in others]
        assert all("failed: it can no longer be reached" in errors for errors in told)
        assert any("process 1 failed" in errors for errors in told)  # who is slow may find who heard it first gone
        assert processes[0].poll() is None
