"""`run-stats` as people see it, from figures chosen by hand, and what it refuses; `bench-run` is retired.

The expected text lies in `golden/`; `BIGLOAD_UPDATE_GOLDEN=1` writes it anew.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bigload_cli.views import run_stats
from run_reports import GIB, forward, stats_report

GOLDEN = Path(__file__).parent / "golden"


def stats_text(report):
    lines = [run_stats.headline(report, name="llama-8b"), "", run_stats.forwards(report).as_text()]
    return "\n".join([*lines, *run_stats.closing(report)]) + "\n"


def test_stats_in_a_pipe():
    text = stats_text(stats_report(forward(0.5, disk=GIB, ram=2 * GIB), forward()))
    path = GOLDEN / "run-stats.pipe.txt"
    if os.environ.get("BIGLOAD_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert max(map(len, run_stats.forwards(stats_report(forward())).as_text().splitlines())) <= 80


def test_a_run_with_nothing_to_bring_in_says_so():
    assert "Nothing was brought in" in stats_text(stats_report())
    resident = forward(disk=0, ram=0, fetch=0.0, wait=0.0)
    assert "All weights were there before." in stats_text(stats_report(resident, resident))


def test_experts_that_cannot_be_loaded_one_by_one_are_named():
    report = stats_report(forward())
    names = tuple(f"model.layers.{number}.feed_forward.experts" for number in range(4))
    told = replace(report, stats=replace(report.stats, whole_experts=names))
    assert "note: all experts of layers 0-3 feed_forward.experts are loaded together." in stats_text(told)


def test_what_the_system_does_not_count_is_no_zero():
    assert " - " in run_stats.forwards(stats_report(forward(disk=None), forward(disk=None))).as_text()


# The program


def test_without_transformers_the_exit_code_is_that_of_bad_usage(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = run("bigload run-stats tiny-llama")
    assert (done.code, done.stdout) == (2, "")
    assert "error: run-stats needs transformers, which is not installed" in done.stderr
    assert "hint: pip install 'bigload[run]'" in done.stderr


@pytest.mark.parametrize("arguments", ["", "--help", "tiny-llama --plan plan.json --tokens 128 --cold -o -"])
def test_the_retired_verb_says_where_it_went(run, arguments):
    done = run(f"bigload bench-run {arguments}")
    assert (done.code, done.stdout) == (2, "")
    assert "error: bench-run is no longer part of the program" in done.stderr
    assert "benchmarks/bench_run.py" in done.stderr
    assert "run-stats" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("--prefetch-bytes 2Gb", 2, '"Gb" means gigabits'),
        ("--resident-bytes -1", 2, "-1"),
        ("--forwards 0", 2, "--forwards"),
        ("--tokens 0", 2, "--tokens"),
        ("--trace nowhere/t.json", 1, "there is no folder nowhere"),
        ("--trace tiny-llama/config.json", 2, "will not write to tiny-llama/config.json"),
        ("--plan gone.json", 2, "gone.json"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(run, here, arguments, code, words):
    before = sorted(here.rglob("*"))
    done = run(f"bigload run-stats tiny-llama {arguments}")
    assert (done.code, done.stdout) == (code, "")
    assert words in done.stderr
    assert sorted(here.rglob("*")) == before


@pytest.mark.peers
@pytest.mark.parametrize("plan", ["gone.json", "tiny-llama/config.json"])
def test_no_plan_is_told(run, here, plan):
    pytest.importorskip("transformers")
    done = run(f"bigload run-stats tiny-llama --plan {plan}")
    assert done.code in (2, 4)
    assert Path(plan).name in done.stderr


@pytest.mark.peers
def test_a_run_is_shown_and_its_trace_is_named(run, here):
    pytest.importorskip("transformers")
    done = run("bigload run-stats tiny-llama --forwards 1 --resident-bytes 0 --trace t.json")
    assert done.code == 0
    assert done.stdout.startswith("tiny-llama -> cpu   LlamaForCausalLM, 14.57 MiB, 14.57 MiB on disk\n")
    assert done.stderr.endswith("Wrote t.json.\n")
    assert {e.get("cat") for e in json.loads((here / "t.json").read_text())["traceEvents"]} >= {"fetch", "compute"}
    assert run("bigload run-stats tiny-llama --forwards 1 --trace t.json -q").code == 0  # its own file is replaced


@pytest.mark.peers
def test_quiet_prints_the_median_seconds_alone(run):
    pytest.importorskip("transformers")
    done = run("bigload run-stats tiny-llama --forwards 1 -q")
    assert done.code == 0
    assert float(done.stdout) > 0
    assert "loading" not in done.stderr


@pytest.mark.peers
def test_a_model_that_streams_nothing_has_an_empty_trace(run, here):
    pytest.importorskip("transformers")
    assert run("bigload plan tiny-llama -m cpu=1GiB -o in-ram.json").code == 0
    done = run("bigload run-stats tiny-llama --plan in-ram.json --forwards 1 --trace -")
    assert json.loads(done.stdout)["traceEvents"] == []
