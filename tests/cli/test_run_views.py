"""What runs look like, from figures chosen by hand, and what the two verbs refuse.

The expected texts lie in `golden/`; `BIGLOAD_UPDATE_GOLDEN=1` writes them anew.
"""

import json
import os
from pathlib import Path

import pytest

from bigload.bench import run_model
from bigload.bench.page_cache_state import CacheState
from bigload.bench.raw_limit import RawKind
from bigload.errors import BenchOptionError, OutputExistsError, WriteError
from bigload_cli.views import bench_run, run_stats
from bigload_cli.views.bench_run import proof
from bigload_cli.views.run_files import RunFiles
from run_reports import GIB, forward, full_run_report, reads, result, run_report, spans, stats_of, stats_report

GOLDEN = Path(__file__).parent / "golden"
DOCUMENT = {"schema": "bigload.bench-run/1.0"}


def compare(name, text):
    path = GOLDEN / name
    if os.environ.get("BIGLOAD_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def bench_text(report):
    lines = [bench_run.headline(report, name="llama-8b"), "", bench_run.runtimes(report).as_text()]
    return "\n".join([*lines, *bench_run.closing(report)]) + "\n"


def stats_text(report):
    lines = [run_stats.headline(report, name="llama-8b"), "", run_stats.forwards(report).as_text()]
    return "\n".join([*lines, *run_stats.closing(report)]) + "\n"


def test_a_bench_of_forwards_in_a_pipe():
    compare("bench-run.pipe.txt", bench_text(full_run_report()))


def test_a_bench_of_decoding_from_a_cold_cache_in_a_pipe():
    report = full_run_report(
        new_tokens=8,
        tokens=128,
        cache=CacheState.COLD,
        cached=(0.0, 0.0),
        reads=reads(1.3, kind=RawKind.DISK),
        timed_forwards=3,
    )
    compare("bench-run-decoding.pipe.txt", bench_text(report))


def test_stats_in_a_pipe():
    compare("run-stats.pipe.txt", stats_text(stats_report(forward(0.5, disk=GIB, ram=2 * GIB), forward())))


def test_a_run_with_nothing_to_bring_in_says_so():
    assert "Nothing was brought in" in stats_text(stats_report())
    assert "Nothing was brought in" in bench_text(
        run_report(result("plain", 0.2), result("bigload", 0.2), disk_bytes=0)
    )
    resident = forward(disk=0, ram=0, fetch=0.0, wait=0.0)
    assert "All weights were there before." in stats_text(stats_report(resident, resident))


def test_what_the_system_does_not_count_is_no_zero():
    assert " - " in run_stats.forwards(stats_report(forward(disk=None), forward(disk=None))).as_text()
    assert "is not counted here" in bench_text(full_run_report(stats=stats_of(forward(disk=None)), timed_forwards=1))


@pytest.mark.parametrize("text", [bench_run.runtimes(full_run_report()), run_stats.forwards(stats_report(forward()))])
def test_the_tables_fit_80_columns(text):
    assert max(map(len, text.as_text().splitlines())) <= 80


def test_an_error_of_another_cannot_command_the_terminal():
    assert "\x1b" not in bench_text(full_run_report())


# Files


def test_document_and_trace_are_written_and_may_be_replaced(tmp_path):
    files = RunFiles(document=tmp_path / "a.json", trace=tmp_path / "b.json")
    for _ in range(2):
        files.check()
        assert files.write(DOCUMENT, stats_of(spans=spans()), name="x") == [tmp_path / "a.json", tmp_path / "b.json"]
    assert json.loads((tmp_path / "a.json").read_text()) == DOCUMENT
    assert len(json.loads((tmp_path / "b.json").read_text())["traceEvents"]) == 7


def test_a_model_that_streams_nothing_has_an_empty_trace(tmp_path):
    RunFiles(trace=tmp_path / "t.json").write(DOCUMENT, None, name="x")
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == []


@pytest.mark.parametrize("kind", ["document", "trace"])
def test_what_is_not_ours_is_not_replaced(tmp_path, kind):
    (tmp_path / "mine.json").write_text('{"mine": 1}')
    with pytest.raises(OutputExistsError, match=r"mine\.json"):
        RunFiles(**{kind: tmp_path / "mine.json"}).check()


def test_two_results_do_not_go_into_one_file(tmp_path):
    with pytest.raises(BenchOptionError, match="one file"):
        RunFiles(document=tmp_path / "a", trace=tmp_path / "." / "a").check()


def test_a_folder_that_is_not_there_is_told_before_anything_runs(tmp_path):
    with pytest.raises(WriteError, match="there is no folder"):
        RunFiles(trace=tmp_path / "no" / "t.json").check()


# The program


@pytest.mark.parametrize("verb", ["bench-run", "run-stats"])
def test_without_transformers_the_exit_code_is_that_of_bad_usage(run, monkeypatch, verb):
    monkeypatch.setattr(run_model, "find_spec", lambda name: None)
    done = run(f"bigload {verb} tiny-llama")
    assert (done.code, done.stdout) == (2, "")
    assert f"error: {verb} needs transformers, which is not installed" in done.stderr
    assert "hint: pip install 'bigload[run]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("bench-run tiny-llama --prefetch-bytes 2Gb", 2, '"Gb" means gigabits'),
        ("bench-run tiny-llama --rounds 0", 2, "--rounds"),
        ("bench-run tiny-llama --tokens 0", 2, "--tokens"),
        ("bench-run tiny-llama --trace nowhere/t.json", 1, "there is no folder nowhere"),
        ("bench-run tiny-llama -o tiny-llama/config.json", 2, "will not write to tiny-llama/config.json"),
        ("bench-run nothing-here", 2, "nothing-here"),
        ("run-stats tiny-llama --resident-bytes -1", 2, "-1"),
        ("run-stats tiny-llama --forwards 0", 2, "--forwards"),
        ("run-stats nothing-here", 2, "nothing-here"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(run, here, arguments, code, words):
    before = sorted(here.rglob("*"))
    done = run(f"bigload {arguments}")
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


def test_a_difference_in_the_last_bit_is_told_from_another_answer():
    rounded = result("b", 1.0, is_identical=False, is_within_rounding=True, max_difference=1e-6)
    other = result("c", 1.0, is_identical=False, is_within_rounding=False, max_difference=0.5)
    assert proof([result("plain", 1.0), rounded, other]) == [
        "b answered as plain, equal but for the last bit: numbers differ by up to 1e-06.",
        "c gave ANOTHER ANSWER than plain: numbers differ by up to 0.5.",
    ]


@pytest.mark.peers
def test_a_run_is_shown_and_its_files_are_named(run, here):
    pytest.importorskip("transformers")
    done = run("bigload bench-run tiny-llama --rounds 1 --no-peers --resident-bytes 0 -o o.json --trace t.json")
    assert done.code == 0
    assert done.stdout.startswith("tiny-llama -> cpu   LlamaForCausalLM, bfloat16, 14.57 MiB, 14.57 MiB on disk\n")
    assert "All 2 answered alike, to the last bit." in done.stdout
    assert done.stderr.endswith("Wrote o.json.\nWrote t.json.\n")
    assert json.loads((here / "o.json").read_text())["schema"] == "bigload.bench-run/1.0"
    assert {e.get("cat") for e in json.loads((here / "t.json").read_text())["traceEvents"]} >= {"fetch", "compute"}


@pytest.mark.peers
@pytest.mark.parametrize("verb", ["bench-run --rounds 1 --no-peers", "run-stats --forwards 1"])
def test_quiet_prints_the_median_seconds_alone(run, verb):
    pytest.importorskip("transformers")
    done = run(f"bigload {verb} tiny-llama -q")
    assert done.code == 0
    assert float(done.stdout) > 0
    assert "round" not in done.stderr
    assert "loading" not in done.stderr
