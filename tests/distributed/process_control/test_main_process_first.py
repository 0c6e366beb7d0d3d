"""Processes that go one before the others, wait for each other and tell each other: real ones, on gloo."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

import bigload
from bigload.errors import ProcessControlError
from rank_processes import returned_by_all, run_launched

TICK_SECONDS = 0.15
"""For which a process keeps others waiting; none of them goes by it."""


def join(rank, size, folder):
    """Join the group, whose store is a file, and which nobody keeps for others."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    return dist


def join_by_tcp(rank, size, folder, **options):
    """Join the group, whose store process 0 keeps, at a port that the system chose."""
    import torch.distributed as dist

    told = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False, **options)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(told)
    else:
        while not told.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(told.read_text()), size, wait_for_workers=False, **options)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist


def raised(act):
    """Return what `act` raises, as a test can read it."""
    try:
        act()
    except BaseException as error:
        facts = {name: getattr(error, name, None) for name in ("rank", "reason")}
        return {"kind": type(error).__name__, "text": str(error), **facts}
    return None


def held():
    """Return how many threads and open files this process has."""
    return [threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))]


# What the ranks of one group do, one thing after the other


def everything(rank, size, folder):
    dist = join(rank, size, folder)
    from torch.distributed.distributed_c10d import _get_default_store

    results = {}
    for name, check in CHECKS.items():
        results[name] = check(rank, size, folder)
        bigload.wait_for_everyone()
    before = held(), _get_default_store().num_keys()
    bigload.wait_for_everyone()
    for _ in range(10):
        order(rank, size, folder)
        bigload.wait_for_everyone()
    results["leaks"] = [before, (held(), _get_default_store().num_keys())]
    bigload.wait_for_everyone()
    dist.destroy_process_group()
    return results


def order(rank, size, folder):
    log = folder / "log"

    def write(line):
        with log.open("a") as file:
            file.write(f"{line}\n")

    with bigload.main_process_first():
        time.sleep(0 if rank else TICK_SECONDS)
        write(f"all {rank}")
    bigload.wait_for_everyone()
    with bigload.local_main_process_first():
        time.sleep(TICK_SECONDS if bigload.is_local_main_process() else 0)
        write(f"host {rank}")
    bigload.wait_for_everyone()
    lines = log.read_text().splitlines()
    bigload.wait_for_everyone()
    log.unlink(missing_ok=True)
    return lines


def nested(rank, size, folder):
    seen = []
    with bigload.main_process_first():
        seen.append("all")
        with bigload.local_main_process_first():
            seen.append("host")
            with bigload.main_process_first():
                seen.append("all")
    return seen


def nested_the_other_way(rank, size, folder):
    with bigload.local_main_process_first(), bigload.main_process_first():
        return True


def failing(failing_rank, error, block=bigload.main_process_first):
    """Return a check in which one process raises `error` in its `block`."""

    def check(rank, size, folder):
        def act():
            with block():
                if rank == failing_rank:
                    raise error

        return raised(act)

    return check


def main_raises_within_an_inner_block(rank, size, folder):
    def act():
        with bigload.main_process_first(), bigload.main_process_first():
            if rank == 0:
                raise ValueError("inner")

    return raised(act)


def main_gets_over_an_inner_failure(rank, size, folder):
    with bigload.main_process_first():

        def act():
            with bigload.main_process_first():
                if rank == 0:
                    raise ValueError("inner")

        return raised(act)


def main_would_wait_for_those_who_wait(rank, size, folder):
    def act():
        with bigload.main_process_first():
            if rank == 0:
                bigload.wait_for_everyone()

    return raised(act)


def triggers(rank, size, folder):
    seen = [bigload.check_trigger()]
    if rank == 1:
        bigload.set_trigger()
    seen.append(bigload.check_trigger())
    bigload.set_trigger()
    return [*seen, bigload.check_trigger(), bigload.check_trigger()]


def indexes(rank, size, folder):
    return [
        bigload.num_processes(),
        bigload.process_index(),
        bigload.local_process_index(),
        [bigload.is_main_process(), bigload.is_local_main_process(), bigload.is_last_process()],
    ]


def without_a_launcher(rank, size, folder):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK"):
        del os.environ[name]
    join(rank, size, folder)
    time.sleep(0 if rank else TICK_SECONDS)
    return [bigload.local_process_index(), order(rank, size, folder)]


def two_of_one_number(rank, size, folder):
    os.environ |= {"LOCAL_RANK": "0"}
    join(rank, size, folder)

    def act():
        with bigload.local_main_process_first():
            pass

    return raised(act)


def leaving_by_break(rank, size, folder):
    for _ in range(3):
        with bigload.main_process_first():
            break
    return True


CHECKS = {
    "order": order,
    "nested": nested,
    "nested_the_other_way": nested_the_other_way,
    "main_raises": failing(0, ValueError("disk full\nand more")),
    "main_is_interrupted": failing(0, KeyboardInterrupt()),
    "main_exits": failing(0, SystemExit(3)),
    "main_raises_within_an_inner_block": main_raises_within_an_inner_block,
    "main_gets_over_an_inner_failure": main_gets_over_an_inner_failure,
    "one_host_fails": failing(2, ValueError("no room on this host"), bigload.local_main_process_first),
    "another_raises": failing(1, ValueError("of its own")),
    "main_would_wait_for_those_who_wait": main_would_wait_for_those_who_wait,
    "triggers": triggers,
    "indexes": indexes,
    "leaving_by_break": leaving_by_break,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return, for each check, what each of four ranks on two hosts found."""
    returned = returned_by_all(run_launched(__file__, "everything", 4, tmp_path_factory.mktemp("group"), hosts=2))
    return {check: [each[check] for each in returned] for check in returned[0]}


def test_the_first_is_done_before_others_begin_of_all_and_of_each_host(found):
    for lines in found["order"]:
        assert lines[0] == "all 0"
        assert sorted(lines[1:4]) == ["all 1", "all 2", "all 3"]
        assert lines.index("host 0") < lines.index("host 1")
        assert lines.index("host 2") < lines.index("host 3")


def test_blocks_may_be_nested(found):
    assert found["nested"] == [["all", "host", "all"]] * 4
    assert found["nested_the_other_way"] == [True] * 4
    assert found["leaving_by_break"] == [True] * 4


def check_others_are_told(ends, reason):
    assert [end["kind"] for end in ends[1:]] == ["RankError"] * 3
    assert [(end["rank"], end["reason"]) for end in ends[1:]] == [(0, reason)] * 3


def test_what_the_first_raises_is_raised_in_the_others_with_its_reason(found):
    ends = found["main_raises"]
    assert ends[0]["kind"] == "ValueError"
    check_others_are_told(ends, "ValueError: disk full\nand more")
    assert "process 0 failed in main_process_first" in ends[1]["text"]
    assert Path(__file__).name in ends[1]["text"]
    assert "main_process_first.py" not in ends[1]["text"].replace(Path(__file__).name, "")


def test_ctrl_c_and_an_exit_of_the_first_release_the_others(found):
    assert found["main_is_interrupted"][0]["kind"] == "KeyboardInterrupt"
    check_others_are_told(found["main_is_interrupted"], "KeyboardInterrupt")
    assert found["main_exits"][0]["kind"] == "SystemExit"
    check_others_are_told(found["main_exits"], "SystemExit: 3")


def test_a_failure_in_an_inner_block_is_told_where_the_others_wait(found):
    check_others_are_told(found["main_raises_within_an_inner_block"], "ValueError: inner")
    check_others_are_told(found["main_gets_over_an_inner_failure"], "ValueError: inner")


def test_a_failure_on_one_host_does_not_reach_the_other(found):
    kinds = [end and (end["kind"], end["rank"]) for end in found["one_host_fails"]]
    assert kinds == [None, None, ("ValueError", None), ("RankError", 2)]


def test_what_another_raises_is_its_own(found):
    assert [end and end["kind"] for end in found["another_raises"]] == [None, "ValueError", None, None]


def test_to_wait_for_those_who_wait_is_an_error_and_not_a_deadlock(found):
    ends = found["main_would_wait_for_those_who_wait"]
    assert ends[0]["kind"] == "ProcessControlError"
    assert "would wait for ever" in ends[0]["text"]
    assert {end["kind"] for end in ends[1:]} == {"RankError"}


def test_a_trigger_of_one_is_seen_by_all_once(found):
    assert found["triggers"] == [[False, True, True, False]] * 4


def test_each_process_knows_its_place(found):
    assert found["indexes"] == [[4, rank, rank % 2, [rank == 0, rank % 2 == 0, rank == 3]] for rank in range(4)]


def test_nothing_piles_up(found):
    assert all(before == after for before, after in found["leaks"])


@pytest.mark.slow
def test_without_a_launcher_processes_are_counted_by_host(tmp_path):
    indexes, lines = zip(*returned_by_all(run_launched(__file__, "without_a_launcher", 3, tmp_path)), strict=True)
    assert indexes == (0, 1, 2)
    assert [lines[0][0], lines[0][3]] == ["all 0", "host 0"]


@pytest.mark.slow
def test_two_of_one_number_on_a_host_are_an_error_and_not_a_deadlock(tmp_path):
    kinds = [end and end["kind"] for end in returned_by_all(run_launched(__file__, "two_of_one_number", 3, tmp_path))]
    assert sorted(map(str, kinds)) == ["None", "ProcessControlError", "ProcessControlError"]


# Deaths. A process that was killed stays a zombie until all others have ended.


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def go_first():
    with bigload.main_process_first():
        pass


def killed_in_its_block(join):
    """Return what ranks do of which the first is killed in its block."""

    def ranks(rank, size, folder):
        join(rank, size, folder)

        def act():
            with bigload.main_process_first():
                time.sleep(TICK_SECONDS)
                die()

        return raised(act)

    return ranks


def killed_before_a_block(victim, join=join):
    """Return what ranks do of which `victim` is killed before a second block."""

    def ranks(rank, size, folder):
        join(rank, size, folder)
        go_first()
        if rank == victim:
            time.sleep(TICK_SECONDS)
            die()
        return raised(go_first)

    return ranks


main_dies_in_its_block = killed_in_its_block(join)
main_dies_in_its_block_and_takes_the_store_along = killed_in_its_block(join_by_tcp)
main_dies_before_its_block = killed_before_a_block(0)
main_dies_before_its_block_and_takes_the_store_along = killed_before_a_block(0, join_by_tcp)
another_dies_before_it_comes = killed_before_a_block(1)


def another_dies_and_all_wait(rank, size, folder):
    join(rank, size, folder)

    def act():
        if rank == 1:
            time.sleep(TICK_SECONDS)
            die()
        bigload.wait_for_everyone()

    return raised(act)


def main_fails_and_leaves_with_the_store(rank, size, folder):
    join_by_tcp(rank, size, folder)
    if rank == 1:
        time.sleep(0.5)
    with bigload.main_process_first():
        if rank == 0:
            raise ValueError("no such repository")


def one_comes_late(rank, size, folder):
    join_by_tcp(rank, size, folder, timeout=timedelta(seconds=1))
    late = int((folder / "late").read_text())

    if rank == late:
        time.sleep(3)
        return None
    return raised(go_first)


def groups_one_after_the_other(rank, size, folder):
    seen = []
    for number in range(2):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        dist = join_by_tcp(rank, size, place)
        with bigload.main_process_first():
            pass
        bigload.wait_for_everyone()
        dist.destroy_process_group()
        with socket.socket() as client:
            client.settimeout(0.2)
            deadline = time.monotonic() + 5
            port = int((place / "port").read_text())
            while client.connect_ex(("127.0.0.1", port)) == 0 and time.monotonic() < deadline:
                time.sleep(0.05)
            seen.append(time.monotonic() < deadline)
    return seen


def ends_of(function, size, folder):
    return run_launched(__file__, function, size, folder)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("function", "dying"),
    [
        ("main_dies_in_its_block", 0),
        ("main_dies_in_its_block_and_takes_the_store_along", 0),
        ("main_dies_before_its_block", 0),
        ("main_dies_before_its_block_and_takes_the_store_along", 0),
        ("another_dies_and_all_wait", 1),
    ],
)
def test_who_waits_for_a_process_that_is_killed_gets_an_error(tmp_path, size, function, dying):
    ends = ends_of(function, size, tmp_path)
    assert [end.status for end in ends] == [-signal.SIGKILL if rank == dying else 0 for rank in range(size)]
    others = [end.returned for rank, end in enumerate(ends) if rank != dying]
    assert [end["kind"] for end in others] == ["RankError"] * (size - 1)
    if dying == 0:
        assert {end["rank"] for end in others} == {0}
        assert all("has ended" in end["reason"] for end in others)


@pytest.mark.slow
def test_the_first_does_not_wait_for_one_that_is_killed(tmp_path):
    ends = ends_of("another_dies_before_it_comes", 3, tmp_path)
    assert [end.status for end in ends] == [0, -signal.SIGKILL, 0]
    assert (ends[0].returned["kind"], ends[0].returned["rank"]) == ("RankError", 1)
    assert "has ended" in ends[0].returned["reason"]
    assert ends[2].returned is None


@pytest.mark.slow
def test_a_first_that_fails_and_keeps_the_store_is_heard_before_it_ends(tmp_path):
    ends = ends_of("main_fails_and_leaves_with_the_store", 3, tmp_path)
    assert [end.status for end in ends] == [1, 1, 1]
    for end in ends[1:]:
        assert "process 0 failed in main_process_first" in end.errors
        assert "ValueError: no such repository" in end.errors


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_does_not_come_is_waited_for_as_long_as_the_group_says(tmp_path, late):
    (tmp_path / "late").write_text(str(late))
    ends = returned_by_all(ends_of("one_comes_late", 3, tmp_path))
    waiting = [1, 2] if late == 0 else [0]
    assert [rank for rank, end in enumerate(ends) if end] == waiting
    for rank in waiting:
        assert (ends[rank]["kind"], ends[rank]["rank"]) == ("RankError", late)
        assert "it has not come to main_process_first in 1 s" in ends[rank]["text"]


@pytest.mark.slow
def test_the_store_ends_with_its_group(tmp_path):
    assert returned_by_all(ends_of("groups_one_after_the_other", 2, tmp_path)) == [[True, True]] * 2


# One process


def test_alone_nothing_waits():
    bigload.wait_for_everyone()
    with bigload.main_process_first(), bigload.local_main_process_first():
        bigload.wait_for_everyone()
    assert [bigload.check_trigger(), bigload.set_trigger(), bigload.check_trigger(), bigload.check_trigger()] == [
        False,
        None,
        True,
        False,
    ]
    with pytest.raises(ValueError, match="mine"), bigload.main_process_first():
        raise ValueError("mine")


@pytest.mark.parametrize(
    "act",
    [
        bigload.wait_for_everyone,
        bigload.check_trigger,
        bigload.main_process_first().__enter__,
        bigload.local_main_process_first().__enter__,
    ],
)
def test_several_processes_without_a_group_are_an_error_and_not_a_silent_pass(launched_by, act):
    launched_by(WORLD_SIZE=4, RANK=1)
    with pytest.raises(ProcessControlError, match="has 4 processes to wait for"):
        act()


# A process that ends before its first call has not said where it is.


def ends_before_its_first_call(rank, size, folder):
    join(rank, size, folder)
    if rank == 1:
        os._exit(0)
    acts = {"wait_for_everyone": bigload.wait_for_everyone, "reshard": share}
    return {
        "first": raised(go_first) if rank == 0 else None,
        **{name: raised(act) for name, act in acts.items()},
    }


def first_ends_before_its_first_call(rank, size, folder):
    join(rank, size, folder)
    if rank == 0:
        os._exit(0)
    return raised(go_first)


def share():
    from bigload.distributed.joining import current_process_group

    with current_process_group():
        pass


@pytest.mark.slow
def test_a_process_that_ended_before_its_first_call_is_missed(tmp_path):
    first, gone, last = run_launched(__file__, "ends_before_its_first_call", 3, tmp_path)
    assert (first.status, gone.status, last.status) == (0, 0, 0), first.errors + last.errors
    for end in (first, last):
        assert {end.returned[name]["kind"] for name in ("wait_for_everyone", "reshard")} == {"RankError"}
        assert end.returned["reshard"]["rank"] == 1
    assert (first.returned["first"]["kind"], first.returned["first"]["rank"]) == ("RankError", 1)


@pytest.mark.slow
def test_a_first_process_that_ended_before_its_first_call_is_missed(tmp_path):
    _, *others = run_launched(__file__, "first_ends_before_its_first_call", 3, tmp_path)
    for end in others:
        assert end.returned is not None, end.errors
        assert (end.returned["kind"], end.returned["rank"]) == ("RankError", 0)
