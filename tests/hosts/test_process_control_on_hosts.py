"""Deferred execution on several hosts: who goes first, and what the others hear of a host that is gone."""

import os
import sys
import time
from pathlib import Path

import pytest
from host_ranks import SILENCE_SECONDS, launched, rank_command, returned, torchrun
from network_hosts import SHARED
from patience import TIMEOUT_SECONDS, wait_for_line

import bigload
from bigload.errors import RankError

pytestmark = pytest.mark.slow

LONG_SECONDS = 1000


def all_of_it(folder, shared):
    """Return what this process is, did and saw."""
    state = bigload.PartialState()
    order = {}
    for name in ("main_process_first", "local_main_process_first"):
        with getattr(state, name)():
            begin = time.monotonic()  # one clock for all hosts of a test
            if state.is_main_process or (name.startswith("local") and state.is_local_main_process):
                time.sleep(0.3)  # time for the others to go wrong
            if name.startswith("local") and state.is_local_main_process:
                meet(Path(shared), state.process_index, {0, 2})
            order[name] = begin, time.monotonic()
        state.wait_for_everyone()
    accelerator = bigload.Accelerator()
    if state.is_last_process:
        accelerator.set_trigger()
    with state.split_between_processes(list(range(10))) as mine:
        pass
    bigload.save({"a": 1}, f"{folder}/saved.pt")
    decorators = ("on_main_process", "on_local_main_process", "on_last_process")
    ran = [name for name in decorators if getattr(state, name)(lambda: True)()]
    failed = [failure("main_process_first", 0), failure("local_main_process_first", 2)]
    state.wait_for_everyone()  # rank 0 serves the store: who asks it after its end blames its own first process
    return {
        "host": os.uname().nodename,
        "local": state.local_process_index,
        "order": order,
        "triggered": accelerator.check_trigger(),
        "mine": mine,
        "ran": [*ran, *(f"local {n}" for n in range(2) if state.on_local_process(lambda: True, n)())],
        "saved": Path(folder, "saved.pt").exists(),
        "failed": failed,
    }


def meet(folder, rank, ranks):
    """Wait until all of `ranks` are here: in blocks of which none may wait for another."""
    (folder / str(rank)).touch()
    for _ in range(TIMEOUT_SECONDS * 5):
        if {str(each) for each in ranks} <= {path.name for path in folder.iterdir()}:
            return
        time.sleep(0.1)
    raise TimeoutError(f"rank {rank} is alone in {folder}")


def failure(name, failing):
    """Return how a block ends that fails in rank `failing`, which is the first of all or of its host."""
    state = bigload.PartialState()
    try:
        with getattr(state, name)():
            if state.process_index == failing:
                raise ValueError("no such file")
    except RankError as error:
        return [error.rank, error.reason, any("no such file" in line for line in error.traceback)]
    except ValueError as error:
        return str(error)
    return "done"


@pytest.mark.parametrize("starts", ["torchrun", "launched"])
def test_two_hosts_of_two_processes(make_hosts, starts):
    hosts = make_hosts(2, has_shared=True)
    for host in hosts:
        (host.tmp / "out").mkdir()
    command = rank_command(all_of_it, "/tmp/out", SHARED)
    if starts == "torchrun":
        processes = torchrun(hosts, *command, per_host=2)
    else:  # by another launcher, that does not number the hosts: their names tell them apart
        processes = launched([hosts[0], hosts[0], hosts[1], hosts[1]], *command)
    found = [each for _, each in sorted(returned(processes).items())]
    assert [each["host"] for each in found] == ["host-0", "host-0", "host-1", "host-1"]
    assert [each["local"] for each in found] == [0, 1, 0, 1]
    assert [each["triggered"] for each in found] == [True] * 4
    assert [each["mine"] for each in found] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [each["saved"] for each in found] == [True, True, False, False]  # in a folder that host 0 has alone
    assert [each["ran"] for each in found] == [
        ["on_main_process", "on_local_main_process", "local 0"],
        ["local 1"],
        ["on_local_main_process", "local 0"],
        ["on_last_process", "local 1"],
    ]
    main, local = (
        [each["order"][name] for each in found] for name in ("main_process_first", "local_main_process_first")
    )
    assert min(begin for begin, _ in main[1:]) >= main[0][1]
    assert [local[1][0] >= local[0][1], local[3][0] >= local[2][1]] == [True, True]
    told = [0, "ValueError: no such file", True]
    assert [each["failed"][0] for each in found] == ["no such file", told, told, told]
    assert [each["failed"][1] for each in found] == ["done", "done", "no such file", [2, told[1], True]]


def waits(what, busy):
    """Tell the test that all are there, and wait for rank `busy`, which does not come; return how that ended."""
    state = bigload.PartialState()
    state.wait_for_everyone()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if state.process_index == busy and what != "first":
        time.sleep(LONG_SECONDS)
    try:
        if what == "everyone":
            state.wait_for_everyone()
        else:
            with state.main_process_first():
                time.sleep(LONG_SECONDS if busy == 0 else 0)
    except RankError as error:
        return [error.rank, str(error)]
    return "done"


@pytest.mark.parametrize("what", ["everyone", "first", "others"])
@pytest.mark.parametrize("end", ["die", "unplug"])
def test_a_host_that_is_gone_is_noticed_by_those_who_wait_for_it(make_hosts, what, end):
    """Without a launcher that watches them: process 0 is waited for in its own block, process 1 at other points."""
    hosts = make_hosts(2)
    gone = 0 if what == "first" else 1
    processes = launched(hosts, *rank_command(waits, what, gone), LOCAL_RANK="0")
    wait_for_line(processes, "ready")
    time.sleep(1)  # they wait now
    getattr(hosts[gone], end)()
    began = time.monotonic()
    ((rank, (failed, text)),) = returned([processes[1 - gone]]).items()
    assert rank == 1 - gone
    assert failed == (None if what == "everyone" else gone)
    assert ("main_process_first" in text) == (what != "everyone")
    assert time.monotonic() - began < (SILENCE_SECONDS if end == "unplug" else 0) + 20
    hosts[gone].die()
    returned([processes[gone]])


def answers_late():
    state = bigload.PartialState()
    state.wait_for_everyone()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with state.main_process_first():
        if state.is_main_process:
            time.sleep(3 * SILENCE_SECONDS)  # longer than a host may be silent: its kernel answers meanwhile
    return "done"


def test_a_process_that_computes_for_long_is_not_taken_for_gone(make_hosts):
    hosts = make_hosts(2)
    assert returned(launched(hosts, *rank_command(answers_late))) == {0: "done", 1: "done"}


def test_a_link_that_comes_back_loses_nothing(make_hosts):
    hosts = make_hosts(2)
    long = str(10 * SILENCE_SECONDS)  # to pull the plug and put it back takes seconds on a busy machine
    processes = launched(hosts, *rank_command(answers_late), LOCAL_RANK="0", SILENCE_SECONDS=long)
    wait_for_line(processes, "ready")
    hosts[1].unplug()
    time.sleep(SILENCE_SECONDS)
    hosts[1].plug_in()
    assert returned(processes) == {0: "done", 1: "done"}
