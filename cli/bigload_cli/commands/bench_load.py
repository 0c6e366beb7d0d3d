"""`bigload bench-load`: serial against parallel loading."""

from __future__ import annotations

from typing import Annotated

import typer

from bigload_cli.options import CheckpointArgument, ColorMode, ColorOption, JsonOption, QuietOption, thread_counts

EPILOG = """\b
Examples:
  bigload bench-load ./llama-8b
  bigload bench-load ./llama-8b --threads 1,2,4,8 --runs 10
  bigload bench-load ./llama-8b --cold --json
"""


def bench_load(
    path: CheckpointArgument,
    threads: Annotated[
        str, typer.Option("--threads", metavar="N,N,...", help="Thread counts to compare; 1 is serial.")
    ] = "1,2,4",
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, max=1000, help="Timed runs of each.")] = 5,
    cold: Annotated[bool, typer.Option("--cold", help="Drop the files from the page cache before each run.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Time serial against parallel loading.

    The strategies take turns, and are checked to load identical bytes. PATH has to fit into memory.
    """
    from bigload_cli import output

    counts = thread_counts(threads)
    from bigload.bench.bench_load import bench_document
    from bigload.bench.bench_load import bench_load as run_bench
    from bigload.checkpoint.source import open_checkpoint
    from bigload.errors import LoadError

    checkpoint = open_checkpoint(path)
    with output.status_line(quiet=quiet) as on_run:
        report = run_bench(checkpoint, threads=counts, runs=runs, cold=cold, on_run=on_run)
    if not report.is_identical:
        raise LoadError(
            "the strategies loaded different bytes", hint="the files changed meanwhile, or memory is faulty"
        )
    if as_json:
        output.print_json(bench_document(report))
    elif quiet:
        output.print_text(str(report.fastest.threads))
    else:
        from bigload_cli.views import bench as view

        output.print_text(view.headline(report, name=checkpoint.name) + "\n")
        output.print_table(view.strategies(report), color=color)
        output.print_text("\n".join(["", *view.closing(report)]))
        for warning in view.warnings(report):
            output.say(f"warning: {warning}")
