"""The bench judges goals by the median round, says what was missed, and runs a tiny row to its documents."""

import json
import math
import sys
from dataclasses import replace

import pytest

import bench
import sizes
from bigload.bench.raw_limit import can_read_direct
from bigload.bench.runner import Contender, Measured
from harness import Goal
from make import load_recipe, make
from program_contender import ProgramContender, ProgramError
from rows import CannotMeasureError, Measurement, Row, RowGoal, judge, per_round, slow_peers
from straight_read import straight_read

FASTER = RowGoal(text="rate", contender="ours", limits=("limit: ",), bound=0.9, is_least=True)
WITHIN = RowGoal(text="time", contender="ours", limits=("read", "compute"), bound=1.1)
SIZES = ("--recipe", "tiny-llama", "--size", "1MiB", "--rounds", "2")


def row_of(seconds, *goals, **more):
    return Row(name="a-row", title="a row", measure=lambda _: Measurement(seconds=seconds), goals=goals, **more)


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(*rows, options=()):
        monkeypatch.setattr(bench, "ROWS", rows)
        files = (tmp_path / "bench.json", tmp_path / "bench.md")
        words = [*SIZES, "--folder", tmp_path, "--json", files[0], "--markdown", files[1], *options]
        code = bench.main([str(word) for word in words])
        return code, json.loads(files[0].read_text()), files[1].read_text()

    return run


def test_of_several_limits_the_fastest_by_its_median_counts():
    found = judge(FASTER, Measurement(seconds={"ours": [2, 4, 5], "limit: a": [3, 3, 3], "limit: b": [1, 9, 9]}))
    assert (found.limits, found.values) == (("limit: a",), (1.5, 0.75, 0.6))
    assert found.shown == Goal(text="rate", value=0.75, bound=0.9)
    assert not found.is_reached


def test_the_limit_of_a_round_is_the_longest_of_several_kinds():
    found = judge(WITHIN, Measurement(seconds={"ours": [2, 3], "read a": [1, 3], "read b": [9, 9], "compute": [2, 2]}))
    assert (found.limits, found.values, found.is_reached) == (("read a", "compute"), (1, 1), True)


def test_a_goal_without_limits_bounds_the_figure_itself():
    goal = RowGoal(text="memory", contender="ours", bound=10, is_memory=True)
    found = judge(goal, Measurement(seconds={"ours": [99]}, memory={"ours": [9, 10, 12]}))
    assert (found.shown.value, found.shown.unit, found.is_reached) == (10, "MiB", True)


@pytest.mark.parametrize(
    ("seconds", "problem"),
    [
        ({"limit: a": [1]}, "ours: it was not measured"),
        ({"ours": [1]}, "limit: peer: not installed"),
    ],
)
def test_what_was_not_measured_is_not_reached(seconds, problem):
    found = judge(FASTER, Measurement(seconds=seconds, problems={"limit: peer": "not installed"}))
    assert (found.is_reached, found.problem) == (False, problem)
    assert math.isnan(found.shown.value)


def test_a_peer_that_is_far_behind_the_best_one_is_not_repeated():
    peers = [Contender(name=name, run=list, may_fail=True) for name in ("a", "b", "c")]
    own = Contender(name="ours", run=list)
    measured = {name: Measured(seconds=(seconds,)) for name, seconds in {"ours": 9, "a": 1, "b": 3, "c": 3.01}.items()}
    assert slow_peers([own, *peers], measured) == {"c": "not repeated: 3.01 s"}
    assert slow_peers([own], measured) == {}


def test_several_runs_of_a_round_are_their_median():
    assert per_round([1, 2, 9, 4, 5, 6], 2) == (2, 5)


def test_all_goals_reached_is_exit_code_0(run):
    code, found, table = run(row_of({"ours": [1, 1], "limit: a": [1, 2]}, FASTER))
    assert (code, found["exit_code"]) == (0, 0)
    assert found["schema"] == "bigload.bench/1.0"
    assert {"commit", "date", "processor"} <= found["conditions"].keys()
    assert found["versions"]["torch"]
    assert "| a-row | rate | 1.50 × | 1.00 × … 2.00 × | ≥ 0.90 × | reached | limit: a |" in table


def test_a_missed_goal_is_named_and_exit_code_3(run):
    code, found, table = run(row_of({"ours": [1.3], "read": [1], "compute": [1]}, WITHIN))
    assert (code, found["rows"][0]["goals"][0]["is_reached"]) == (3, False)
    assert "0 of 1 goals reached in 0.0 minutes. Missed:\n- a-row: time" in table


def test_a_row_that_cannot_run_says_why_and_is_not_reached(run):
    code, found, table = run(row_of({}, FASTER, packages=("no-such-package",), disk=1e9))
    assert code == 3
    problem = found["rows"][0]["goals"][0]["problem"]
    assert problem.startswith("no-such-package is not installed; needs ")
    assert found["rows"][0]["is_skipped"]
    assert "| skipped | no-such-package is not installed" in table


def test_an_error_of_a_row_is_exit_code_1_and_others_still_run(run):
    def fail(_):
        raise OSError("disk failed")

    broken = replace(row_of({}, FASTER), name="broken", measure=fail)
    code, found, _ = run(broken, row_of({"ours": [1], "limit: a": [1]}, FASTER))
    assert code == 1
    assert [each["error"] for each in found["rows"]] == ["OSError: disk failed", None]
    assert [each["is_reached"] for each in found["rows"]] == [False, True]


def test_an_interrupted_run_leaves_the_rows_that_it_has_and_nothing_else(run, tmp_path):
    def interrupt(_):
        raise KeyboardInterrupt

    cut = replace(row_of({}, FASTER), name="cut", measure=interrupt)
    code, found, table = run(row_of({"ours": [1], "limit: a": [1]}, FASTER), cut, replace(cut, name="last"))
    assert (code, found["rows_left"]) == (130, ["cut", "last"])
    assert [each["name"] for each in found["rows"]] == ["a-row"]
    assert "not measured yet: cut, last" in table
    assert {path.name for path in tmp_path.iterdir()} == {"bench.json", "bench.md"}


def test_quick_has_other_programs_only_where_a_goal_names_them(run):
    seen = []

    def look(setting):
        seen.append(setting.with_peers)
        return Measurement(seconds={"ours": [1], "limit: a": [1], "peer: b": [1]})

    row = replace(row_of({}, FASTER, is_quick=True), measure=look)
    beside = replace(row, name="next", goals=(replace(FASTER, limits=("limit: |peer: ",)),))
    run(row, beside, options=("--quick",))
    run(row)
    assert seen == [False, True, True]


def test_what_a_row_writes_is_gone_before_the_next(run, tmp_path):
    def write(setting):
        assert [path.name for path in setting.checkpoints.iterdir()] == [setting.folder.name]
        (setting.folder / "out").write_bytes(bytes(9))
        setting.opened.callback((tmp_path / "closed").touch)
        return Measurement(seconds={"ours": [1], "limit: a": [1]})

    row = replace(row_of({}, FASTER), measure=write)
    assert run(row, replace(row, name="next"))[0] == 0
    assert (tmp_path / "closed").exists()


def test_rows_of_one_size_share_their_checkpoint(run):
    seen = []

    def look(setting):
        seen.append((setting.model.root, setting.rounds))
        return Measurement(seconds={"ours": [1], "limit: a": [1]})

    row = replace(row_of({}, FASTER), measure=look)
    code, found, _ = run(row, replace(row, name="next"))
    assert (code, seen[0]) == (0, seen[1])
    assert [(each["size_bytes"], each["rounds"]) for each in found["rows"]] == [(1 << 20, 2)] * 2


def test_sizes_are_of_rows_that_there_are():
    names = {row.name for row in bench.ROWS}
    assert sizes.FULL.keys() | sizes.QUICK.keys() <= names
    assert sizes.QUICK.keys() <= {row.name for row in bench.ROWS if row.is_quick}


def test_a_log_without_a_terminal_names_each_row_and_its_time(run, capsys):
    run(row_of({"ours": [1, 1], "limit: a": [1, 2]}, FASTER))
    shown = capsys.readouterr().err
    assert "[1/1] a-row: 1.00 MiB, 2 rounds\n" in shown
    assert "  took 0 s\n" in shown


def test_a_reason_of_a_row_is_no_error(run):
    def refuse(_):
        raise CannotMeasureError("no such device")

    assert run(replace(row_of({}, FASTER), measure=refuse))[0] == 3


@pytest.mark.parametrize("name", ["load-warm-private", "load-cold"])
def test_a_tiny_row_has_figures_of_each_round(run, name):
    chosen = [row for row in bench.ROWS if row.name == name]
    code, found, table = run(*chosen, options=("--only", name, "--no-peers"))
    assert code in {0, 3}
    (measured,) = found["rows"]
    assert {len(seconds) for seconds in measured["seconds"].values()} == {2}
    assert measured["problems"]["peer: safetensors, clone"] == "left out (--no-peers)"
    assert f"## {name}" in table


def test_every_row_has_a_name_and_a_goal_of_its_own():
    names = [row.name for row in bench.ROWS]
    assert len(set(names)) == len(names)
    assert all(row.goals for row in bench.ROWS)


@pytest.mark.parametrize("is_direct", [False, True])
def test_the_straight_read_has_every_byte(tmp_path, is_direct):
    made = make(load_recipe("tiny-llama"), tmp_path / "model", data="random")
    if is_direct and not can_read_direct(made.shards):
        pytest.skip("this file system does not read past the page cache")
    buffers = straight_read(made.shards, threads=2, block_bytes=64 << 10, is_direct=is_direct)
    for file, buffer in zip(made.shards, buffers, strict=True):
        content = file.read_bytes()
        assert buffer[: len(content)] == content


@pytest.mark.slow
def test_a_tiny_reshard_is_measured_beside_cp_and_raw_writes(run):
    chosen = [row for row in bench.ROWS if row.name == "reshard"]
    code, found, _ = run(*chosen, options=("--rounds", "1"))
    assert code in {0, 3}
    (measured,) = found["rows"]
    assert {"limit: cp -r, sync", "bigload, none", "bigload, full"} < measured["seconds"].keys()
    assert all(len(runs) == 1 and runs[0] > 0 for runs in measured["seconds"].values())
    assert measured["memory_mebibytes"].keys() == measured["seconds"].keys()


@pytest.mark.parametrize("name", ["verify", "stale-plan"])
def test_a_tiny_check_is_measured(run, name):
    chosen = [row for row in bench.ROWS if row.name == name]
    code, found, _ = run(*chosen, options=("--rounds", "1"))
    assert code in {0, 3}
    assert all(len(runs) == 1 and runs[0] > 0 for runs in found["rows"][0]["seconds"].values())


def test_quick_runs_the_main_rows_only(run):
    reached = row_of({"ours": [1], "limit: a": [1]}, FASTER)
    code, found, _ = run(reached, replace(reached, name="main", is_quick=True), options=("--quick",))
    assert (code, [each["name"] for each in found["rows"]]) == (0, ["main"])


def test_a_program_that_fails_is_a_problem_with_its_error_line(tmp_path):
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no such file\\nhint: none')"]
    contender = ProgramContender(name="peer", words=failing, out=tmp_path / "out")
    with contender.turn() as run, pytest.raises(ProgramError, match=r"^error: no such file$"):
        run()
