"""`bigload bench-load`: read strategies compared with each other, raw reads and other loaders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from bigload.loading.settings import Method
from bigload_cli.options import (
    CHECKPOINT,
    COLOR,
    JSON,
    QUIET,
    ColorMode,
    option,
    size_option,
    thread_counts,
)

if TYPE_CHECKING:
    from bigload.bench.results.report import BenchReport
    from bigload_cli.output import AnswerForm

EPILOG = """\b
Examples:
  bigload bench-load ./llama-8b
  bigload bench-load ./llama-8b --threads 1,2,4,8 --method read,mmap --warm --runs 10
  bigload bench-load ./llama-8b --cold --json
  bigload bench-load ./llama-8b --peers --plot loads.svg --trace trace.json

\b
A run ends when every byte can be used. With mmap, tensors stay pages of the
file: one byte of every page is read before the clock stops, for bigload and
for others alike. OF RAW compares medians with a raw read of the same bytes,
by turns with the loads. PRIVATE and FILE are the most memory, of the process
itself and of pages of files, above what was held before a run.
"""

_PICTURE_SUFFIXES = (".png", ".svg")


def bench_load(
    path: str = CHECKPOINT,
    threads: str = option("1,2,4", "--threads", "N,N,...", "Thread counts to compare; 1 is serial."),
    method: str = option(
        "auto", "--method", "M,M,...", "Ways to read to compare: auto, read, mmap, direct. All with all."
    ),
    runs: int = option(5, "--runs", "N", "Timed runs of each.", min=1, max=1000),
    cold: bool = option(False, "--cold", "Drop the files from the page cache before each run, and check it."),
    warm: bool = option(False, "--warm", "Read the files into the page cache before."),
    device: str = option("cpu", "--device", "DEVICE", "Load to cpu, or to cuda:0."),
    dtype: str | None = option(None, "--dtype", "DTYPE", "Convert weights to bf16, fp16 or fp32 on the way."),
    max_inflight: str | None = option(None, "--max-inflight", "SIZE", "Read or staged at one moment at most."),
    peers: bool = option(False, "--peers", "Time other loaders that are installed, in this process, by turns."),
    export_markdown: Path | None = option(None, "--export-markdown", "FILE", "Write the table for a README."),
    plot: Path | None = option(None, "--plot", "FILE", "Write a picture, .png or .svg. Needs matplotlib."),
    trace: Path | None = option(None, "--trace", "FILE", "Write what threads did, for chrome://tracing or Perfetto."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Time ways of loading: threads, methods, other loaders.

    The strategies take turns, and are checked to load identical bytes. PATH has to fit into memory.
    """
    from bigload_cli.output import AnswerForm, status_line

    counts, ways = thread_counts(threads), methods(method)
    inflight = None if max_inflight is None else size_option("--max-inflight", max_inflight)
    from bigload.bench.results.result_marks import MADE_BY_BENCH_LOAD
    from bigload_cli.result_files import check_results, say_written

    check_picture(plot)
    on_stdout = check_results([export_markdown, plot, trace], made_by=MADE_BY_BENCH_LOAD, as_json=as_json)
    from bigload.bench.bench_load import bench_load as run_bench
    from bigload.checkpoint.source import open_checkpoint
    from bigload.errors import LoadError

    checkpoint = open_checkpoint(path)
    with status_line(quiet=quiet) as on_run:
        report = run_bench(
            checkpoint,
            threads=counts,
            methods=ways,
            runs=runs,
            cold=cold,
            warm=warm,
            device=device,
            dtype=dtype,
            max_inflight=inflight,
            peers=peers,
            on_run=on_run,
        )
    if not report.is_identical:
        raise LoadError(
            "the strategies loaded different bytes", hint="the files changed meanwhile, or memory is faulty"
        )
    written = write_files(report, name=checkpoint.name, markdown=export_markdown, plot=plot, trace=trace)
    if not on_stdout:
        _show(report, checkpoint.name, AnswerForm(as_json, quiet, color))
    if not quiet:
        say_written(written)


def methods(text: str) -> tuple[Method, ...]:
    """Return the methods in a list such as `read,mmap`."""
    words = [word.strip().lower() for word in text.split(",")]
    known = [method.value for method in Method]
    if unknown := [word for word in words if word not in known]:
        raise typer.BadParameter(f"--method {text}: {unknown[0]!r} is none of {', '.join(known)}")
    return tuple(dict.fromkeys(Method(word) for word in words))


def check_picture(path: Path | None) -> None:
    """Raise unless a plot can be drawn for `path`."""
    from bigload.errors import OptionError
    from bigload.extras import require

    if path is None:
        return
    if path.suffix.lower() not in _PICTURE_SUFFIXES:
        raise OptionError(f"--plot {path}: a picture ends with {' or '.join(_PICTURE_SUFFIXES)}")
    require("matplotlib", asked_by="--plot", extra="plot")


def write_files(
    report: BenchReport,
    *,
    name: str,
    markdown: Path | None = None,
    plot: Path | None = None,
    trace: Path | None = None,
) -> list[Path]:
    """Write the result files that were asked for and return their paths."""
    import json

    from bigload.bench.results.chrome_trace import load_trace
    from bigload_cli.result_files import write_results
    from bigload_cli.views import bench_markdown, bench_plot

    activities = {result.name: result.activities for result in report.results}
    return write_results(
        (
            (markdown, lambda: bench_markdown.markdown(report, name=name)),
            (plot, lambda: bench_plot.picture(report, name=name, suffix=plot.suffix if plot else "")),
            (trace, lambda: json.dumps(load_trace(activities))),
        )
    )


def _show(report: BenchReport, name: str, form: AnswerForm) -> None:
    from bigload.bench.results.document import bench_document
    from bigload.plain_text import printable
    from bigload_cli import output
    from bigload_cli.views import bench_load as view

    assert report.recommendation is not None, "a finished bench has one"
    threads = str(report.recommendation.threads)
    output.print_answer(
        form,
        lambda: bench_document(report),
        threads,
        lambda: view.shown(report, name=name, blocks=output.can_draw_on_stdout()),
    )
    for warning in report.warnings if form.is_for_people else ():
        output.say(f"warning: {printable(warning.text)}")
