"""One reshard by several processes: the bytes of one alone, and no end that leaves a process waiting or work lost."""

import fcntl
import json
import os
import shutil
import signal
from functools import partial

import pytest

import bigload
from bigload.distributed.process_group import SingleProcess
from bigload.errors import BigloadError, OutputExistsError, RankError, ReadError, WriteError
from bigload.layouts.resharding import execution, rank_share
from bigload.layouts.resharding.reshard import reshard
from bigload.layouts.writing import staging as staging_module
from bigload.layouts.writing.journal import journal_name
from builders import contents, make_checkpoint
from reshard_teams import check_resumed as check_resumed_in_teams
from reshard_teams import entries, finished, make_impatient, run_until_killed
from reshard_teams import run as run_in_team
from thread_process_groups import GoneError, outcomes

NUM_SHARES = 8
"""How often the processes of a reshard hear each other: each is a place to die at."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("team") / "source", blocks=5, shards=3)


@pytest.fixture(scope="module")
def expected(source):
    reshard(source, source.with_name("expected"), max_shard_bytes=1500, team=SingleProcess())
    return contents(source.with_name("expected"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    make_impatient(monkeypatch)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


run = partial(run_in_team, max_shard_bytes=1500)
check_resumed = partial(check_resumed_in_teams, run=run)


@pytest.mark.parametrize("size", [1, 2, 3, 12])
@pytest.mark.sample(2)
def test_several_write_what_one_writes(source, expected, tmp_path, size):
    reports = outcomes(size, lambda team: run(source, tmp_path / "out", team))
    assert contents(tmp_path / "out") == expected
    assert entries(tmp_path) == ["out"]
    assert {(report.num_bytes, report.kept_bytes, report.verified) for report in reports} == {
        (reports[0].num_bytes, 0, True)
    }


def test_each_writes_its_own_files(source, tmp_path):
    seen = [set(), set(), set()]

    def work(team):
        run(source, tmp_path / "out", team, on_progress=lambda done: seen[team.rank].add(done.file))

    outcomes(3, work)
    assert all(seen)
    assert sum(map(len, seen)) == len(set().union(*seen)) == len(list((tmp_path / "out").glob("*.safetensors")))


@pytest.mark.parametrize("number", range(NUM_SHARES))
@pytest.mark.parametrize(("size", "dying"), [(2, 0), pytest.param(2, 1, marks=pytest.mark.slow), (3, 1)])
@pytest.mark.sample(4)
def test_who_dies_between_steps_is_named_and_the_work_is_gone_on_with(source, expected, out, size, dying, number):  # noqa: PLR0917
    ends = outcomes(size, lambda team: run(source, out, team), dies_at={dying: number})
    assert isinstance(ends[dying], GoneError)
    for rank, end in enumerate(ends):
        if rank != dying:
            # The first takes the folder along if it ends before the others have seen it, or written to it.
            is_gone = isinstance(end, WriteError) and "No such file" in str(end) and rank != 0
            assert is_gone or isinstance(end, RankError)
            assert is_gone or end.rank == dying or "does not see" in end.reason
    assert not out.exists() or contents(out) == expected
    check_resumed(source, out, expected, 4 - size)


def test_a_folder_with_nothing_but_the_journal_of_another_rank_is_taken_over(source, expected, out):
    # What is left if rank 0 removes the folder of a failed run while rank 2 opens its journal there.
    staging = staging_module.staging_folder(out)
    staging.mkdir()
    (staging / journal_name(2)).touch()
    check_resumed(source, out, expected, 1)


def test_a_journal_beside_files_of_others_is_not_taken_over(source, out):
    staging = staging_module.staging_folder(out)
    staging.mkdir()
    (staging / journal_name(2)).touch()
    (staging / "mine.txt").touch()
    with pytest.raises(OutputExistsError, match="not made by bigload"):
        run(source, out, SingleProcess(), resume=True)
    assert (staging / "mine.txt").exists()


def test_the_last_share_is_the_last_place_to_die_at(source, tmp_path):
    ends = outcomes(2, lambda team: (run(source, tmp_path / "out", team), team.num_shares))
    assert {end[1] for end in ends} == {NUM_SHARES}


@pytest.mark.parametrize("step", ["_begin", "finish", "_finish"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.sample(2)
def test_an_error_in_one_is_told_by_all_and_the_work_is_gone_on_with(  # noqa: PLR0917
    source, expected, out, monkeypatch, step, failing
):
    kind = rank_share.RankShare if step == "finish" else execution.ReshardRun
    original = getattr(kind, step)

    def refused(self, *arguments):
        result = original(self, *arguments)
        if (self.rank if step == "finish" else self.team.rank) == failing:
            raise ReadError("model.safetensors", "input/output error")
        return result

    with monkeypatch.context() as patched:
        patched.setattr(kind, step, refused)
        ends = outcomes(2, lambda team: run(source, out, team))
    if failing == 1 and step == "_finish":  # which only the first does
        assert contents(out) == expected
        return
    assert isinstance(ends[failing], ReadError)
    assert isinstance(ends[1 - failing], RankError)
    assert f"process {failing} failed: ReadError" in str(ends[1 - failing])
    assert not out.exists()
    if step == "_begin":
        assert entries(out.parent) == []
        return
    report = check_resumed(source, out, expected, 3)
    assert report.kept_bytes == report.num_bytes


def test_a_failure_to_publish_reaches_all(source, expected, tmp_path, monkeypatch):
    def refused(*arguments, **options):
        raise OSError(5, "input/output error")

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(staging_module, "_publish", refused)
        first, second = outcomes(2, lambda team: run(source, out, team))
    assert isinstance(first, WriteError)
    assert isinstance(second, RankError)
    assert check_resumed(source, out, expected, 1).kept_bytes


@pytest.mark.parametrize(
    "options", [{"dtype": "fp16"}, {"max_shard_bytes": 3000}, {"verify": "size"}, {"resume": True}]
)
def test_other_options_are_refused_and_nothing_is_written(source, tmp_path, options):
    def work(team):
        run(source, tmp_path / "out", team, **(options if team.rank == 2 else {}))

    for end in outcomes(3, work):
        assert isinstance(end, RankError)
        assert end.rank == 2
        assert "differs from process 0" in str(end)
    assert entries(tmp_path) == []


def test_another_source_is_refused(source, tmp_path):
    other = shutil.copytree(source, tmp_path / "other")
    os.utime(next(other.glob("*.safetensors")), (1, 1))  # the same bytes, written at another time
    ends = outcomes(2, lambda team: run(other if team.rank else source, tmp_path / "out", team))
    assert [end.rank for end in ends] == [1, 1]


def test_a_source_that_one_does_not_see_is_told_by_all(source, tmp_path):
    missing = tmp_path / "missing"
    first, second = outcomes(2, lambda team: run(missing if team.rank else source, tmp_path / "out", team))
    assert (first.rank, type(second)) == (1, bigload.CheckpointNotFoundError)
    assert str(missing) in first.reason
    assert entries(tmp_path) == []


def test_an_output_that_one_does_not_see_is_named_with_its_host(source, tmp_path):
    for end in outcomes(2, lambda team: run(source, tmp_path / f"host-{team.rank}" / "out", team)):
        assert isinstance(end, RankError)
        assert end.rank == 1
        assert f"on {os.uname().nodename} it does not see {tmp_path / 'host-1' / 'out.partial'}" in end.reason
    assert not (tmp_path / "host-0" / "out.partial").exists()


def test_nobody_begins_while_a_process_of_a_team_that_failed_still_writes(source, tmp_path):
    out = tmp_path / "out"
    ends = outcomes(2, lambda team: run(source, out, team), dies_at={0: NUM_SHARES - 2})
    assert isinstance(ends[1], RankError)
    with (tmp_path / "out.partial" / ".bigload-journal-1.jsonl").open("r+") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        for options in ({"resume": True}, {"force": True}):
            with pytest.raises(OutputExistsError, match="another process is writing it now"):
                run(source, out, SingleProcess(), **options)
    run(source, out, SingleProcess(), resume=True)


def test_a_source_that_changed_voids_the_work_of_all(source, tmp_path, monkeypatch):
    mine = shutil.copytree(source, tmp_path / "source")
    original = execution.ReshardRun._check_unchanged

    def changed_meanwhile(self, *arguments):
        if self.team.rank == 1:
            os.utime(next(mine.glob("*.safetensors")), (1, 1))
        original(self, *arguments)

    monkeypatch.setattr(execution.ReshardRun, "_check_unchanged", changed_meanwhile)
    ends = outcomes(2, lambda team: run(mine, tmp_path / "out", team))
    assert all(isinstance(end, BigloadError) for end in ends)
    assert isinstance(ends[1], ReadError)
    assert entries(tmp_path) == ["source"]


# The program, as torchrun starts it


@pytest.mark.slow
def test_under_torchrun_the_first_speaks_for_all(source, expected, tmp_path):
    options = ("--max-shard-size", "1500")
    code, output, errors = finished(2, source, tmp_path / "dry", *options, "--dry-run")
    assert (code, output.count("nothing was written"), entries(tmp_path)) == (0, 1, []), errors
    code, output, errors = finished(2, source, tmp_path / "json", *options, "--json")
    assert code == 0, errors
    assert json.loads(output)["schema"].startswith("bigload.reshard")
    code, output, errors = finished(2, source, tmp_path / "out", *options, "-q")
    assert (code, output) == (0, f"{tmp_path / 'out'}\n"), errors
    assert contents(tmp_path / "out") == contents(tmp_path / "json") == expected
    code, output, errors = finished(2, source, tmp_path / "out", *options)
    assert (code, output) == (1, "")
    assert "it exists" in errors


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "number"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGTERM)])
def test_a_killed_process_ends_all_and_the_rest_is_done_later(source, expected, tmp_path, killed, number):
    out, tell = tmp_path / "place" / "out", tmp_path / "tell"
    out.parent.mkdir()
    run_until_killed(2, killed, source, out, "--max-shard-size", "1500", tell=tell, number=number)
    assert not out.exists()
    for size in (3, 1):
        folder = tmp_path / str(size)
        shutil.copytree(out.parent, folder)
        code, _, errors = finished(size, source, folder / "out", "--max-shard-size", "1500", "--resume")
        assert code == 0, errors
        assert contents(folder / "out") == expected
        assert entries(folder) == ["out"]
