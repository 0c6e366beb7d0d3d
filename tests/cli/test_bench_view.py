"""View of a bench, from figures chosen by hand: on terminals, in pipes, as Markdown and as a picture.

The expected texts lie in `golden/`; `BIGLOAD_UPDATE_GOLDEN=1` writes them anew.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from bench_reports import full_report, report_of, strategy
from bigload import extras
from bigload.bench.loaded_memory import MemoryKind
from bigload.bench.results.recommendation import Recommendation, SizeMeasured
from bigload.bench.results.report import PeerResult
from bigload.bench.results.result_marks import MADE_BY_BENCH_LOAD
from bigload.errors import MissingPackageError, OptionError, OutputExistsError, WriteError
from bigload.loading.settings import Method
from bigload_cli.commands.bench_load import check_picture, write_files
from bigload_cli.result_files import check_results
from bigload_cli.views import bench_load as view
from bigload_cli.views.bench_markdown import markdown

GOLDEN = Path(__file__).parent / "golden"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def compare(name, text):
    path = GOLDEN / name
    if os.environ.get("BIGLOAD_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def as_text(report):
    pieces = view.shown(report, name="llama-8b", blocks=True)
    return "".join(f"{piece}\n" if isinstance(piece, str) else piece.as_text() for piece in pieces)


def test_a_bench_in_a_pipe():
    compare("bench-load.pipe.txt", as_text(full_report()))


def test_a_bench_in_markdown():
    compare("bench-load.md", markdown(full_report(), name="llama-8b|[x](y)<b>"))


def test_the_table_of_common_figures_fits_80_columns():
    table = view.strategies(full_report()).as_text()
    assert max(map(len, table.splitlines())) <= 80


def test_a_quick_load_is_shown_in_milliseconds_and_a_single_run_without_a_spread():
    table = view.strategies(report_of(strategy(1, Method.READ, 0.0123))).as_text()
    assert "MS ± σ" in table
    assert " 12.3  " in table
    assert "±" not in table.splitlines()[1]


def test_a_peer_s_error_cannot_command_the_terminal():
    assert "\x1b" not in as_text(full_report())


@pytest.mark.parametrize(
    ("threads", "sizes", "words"),
    [
        (1, (), "Use 1 thread, read: more threads were not faster here."),
        (4, (), "No part of the checkpoint is of a size to try"),
        (4, ((1, 2.0, 1.0), (9, 2.0, 1.0)), "Several threads pay from 1 B on, the smallest size tried (1 B, 9 B)."),
        (4, ((1, 1.0, 1.0), (9, 2.0, 1.0)), "Several threads do not pay below 9 B (tried: 1 B, 9 B)."),
        (4, ((1, 1.0, 1.0), (9, 1.0, 1.0)), "were not faster than one by much at 1 B, 9 B"),
        (4, ((1, 2.0, 1.0), (9, 1.0, 1.0)), "cannot be said"),
    ],
)
def test_the_advice_claims_no_more_than_was_measured(threads, sizes, words):
    found = tuple(SizeMeasured(num_bytes=n, serial_seconds=s, parallel_seconds=p) for n, s, p in sizes)
    advice = Recommendation(strategy="", threads=threads, method="read", sizes=found)
    results = (strategy(1, Method.READ, 1.0), strategy(4, Method.READ, 1.0))
    assert words in view.advice(report_of(*results, recommendation=advice))


@pytest.mark.parametrize(("spread", "is_noise"), [(0.01, False), (0.6, True)])
def test_advice_that_rests_on_noise_says_so(spread, is_noise):
    results = [strategy(n, Method.READ, mean - spread, mean + spread) for n, mean in ((1, 1.6), (4, 1.0))]
    report = report_of(*results, recommendation=Recommendation(strategy="", threads=4, method="read"))
    assert ("no difference here is beyond noise" in view.advice(report)) is is_noise


def test_peers_that_failed_alike_are_told_in_one_line_that_does_not_mix_names():
    peers = [
        PeerResult(name=name, package="x", version="2", memory=MemoryKind.PRIVATE, problem="reads .bin, .pt")
        for name in ("torch.load", "torch.load, mmap")
    ]
    notes = view.peer_notes(report_of(strategy(1, Method.READ, 1.0), peers=tuple(peers)))
    assert notes == ["not measured: torch.load 2; torch.load, mmap 2 (reads .bin, .pt)"]


def test_the_only_thread_count_is_not_called_the_best():
    advice = Recommendation(strategy="", threads=1, method="read")
    report = report_of(strategy(1, Method.READ, 1.0), recommendation=advice)
    assert view.advice(report) == "Use 1 thread, read: no other thread count was tried."


# Files


def checked(*paths):
    return check_results(paths, made_by=MADE_BY_BENCH_LOAD)


def test_markdown_and_trace_are_written_and_may_be_replaced(tmp_path):
    text, trace = tmp_path / "a.md", tmp_path / "b.json"
    for _ in range(2):
        checked(text, trace)
        assert write_files(full_report(), name="x", markdown=text, trace=trace) == [text, trace]
    assert text.read_text() == markdown(full_report(), name="x")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "b.json"]


@pytest.mark.parametrize("name", ["README.md", "mine.json"])
def test_what_is_not_ours_is_not_replaced(tmp_path, name):
    (tmp_path / name).write_text("# mine\n")
    with pytest.raises(OutputExistsError, match=name):
        checked(tmp_path / name)


def test_a_folder_that_is_not_there_is_told_before_anything_runs(tmp_path):
    with pytest.raises(WriteError, match="there is no folder"):
        checked(None, tmp_path / "no" / "t.json")


def test_two_results_do_not_go_into_one_file(tmp_path):
    with pytest.raises(OptionError, match="one file"):
        checked(tmp_path / "a", tmp_path / "." / "a")


def test_a_picture_of_another_kind_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"\.png or \.svg"):
        check_picture(tmp_path / "a.gif")


def test_without_matplotlib_the_command_that_installs_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bigload\[plot\]'"):
        check_picture(tmp_path / "a.png")


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.parametrize(("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_names_what_was_measured_and_may_be_replaced(tmp_path, suffix, beginning):
    path = tmp_path / f"a{suffix}"
    for _ in range(2):
        checked(path)
        write_files(full_report(), name="a$b_{c}$", plot=path)
    content = path.read_bytes()
    assert content.startswith(beginning)
    if suffix == ".svg":
        for words in ("auto, 4 threads", "safetensors, clone", "raw read into fresh memory"):
            assert words.encode() in content


# The program


def test_files_are_written_and_named_beside_the_answer(run, here):
    done = run("bigload bench-load tiny-llama --runs 1 --threads 1 --export-markdown a.md --trace t.json --json")
    assert done.code == 0
    assert json.loads(done.stdout)["schema"] == "bigload.bench-load/1.1"
    assert done.stderr.endswith("Wrote a.md.\nWrote t.json.\n")
    assert (here / "a.md").read_text().startswith("<!-- made by bigload bench-load -->\ntiny-llama -> cpu")
    assert json.loads((here / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("--cold --warm", 2, "--cold and --warm"),
        ("--method fast", 2, "'fast' is none of auto, read, mmap, direct"),
        ("--method ''", 2, "is none of"),
        ("--max-inflight 2Gb", 2, '"Gb" means gigabits'),
        ("--peers --dtype fp32", 2, "--dtype or --peers"),
        ("--dtype fp33", 2, "fp33"),
        ("--device gpu", 2, "gpu"),
        ("--trace nowhere/t.json", 1, "there is no folder nowhere"),
        ("--plot a.gif", 2, ".png or .svg"),
        ("--export-markdown tiny-llama/config.json", 2, "will not write to tiny-llama/config.json"),
    ],
)
def test_what_cannot_be_done_is_told_and_nothing_is_written(run, here, arguments, code, words):
    before = sorted(here.rglob("*"))
    done = run(f"bigload bench-load tiny-llama --runs 1 --threads 1 {arguments}")
    assert (done.code, done.stdout) == (code, "")
    assert words in done.stderr
    assert sorted(here.rglob("*")) == before


def test_the_peers_are_not_imported_unless_they_are_asked_for(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "bigload.bench.peers", None)  # to import it is an error now
    assert run("bigload bench-load tiny-llama --runs 1 --threads 1 -q").code == 0
    assert run("bigload bench-load tiny-llama --runs 1 --threads 1 -q --peers").code == 1
