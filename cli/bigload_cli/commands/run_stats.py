"""`bigload run-stats`: what bringing in weights costs a model, forward by forward."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigload_cli.options import (
    ColorMode,
    ColorOption,
    JsonOption,
    ModelArgument,
    PrefetchBytesOption,
    QuietOption,
    ResidentBytesOption,
    RunPlanOption,
    TokensOption,
    size_option,
)

EPILOG = """\b
Examples:
  bigload run-stats ./llama-8b
  bigload run-stats ./llama-8b --plan plan.json --forwards 5 --trace trace.json
  bigload run-stats ./llama-8b --resident-bytes 4GiB --tokens 128 --json

\b
WAITED is the time that the model stood still for weights, OVERLAP the part of
bringing them in during which it did not. WEIGHTS is the most of streamed
weights that was there, or on its way, at one moment.
"""


def run_stats(
    path: ModelArgument,
    plan: RunPlanOption = None,
    forwards: Annotated[int, typer.Option("--forwards", metavar="N", min=1, max=1000, help="How often it runs.")] = 3,
    tokens: TokensOption = 1,
    prefetch_bytes: PrefetchBytesOption = None,
    resident_bytes: ResidentBytesOption = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write what threads did, for chrome://tracing or Perfetto."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Run a model a few times, and show what its weights cost.

    PATH is the folder of a model of transformers, which has to be installed.
    """
    from bigload_cli import output
    from bigload_cli.result_files import say_written
    from bigload_cli.views.run_files import RunFiles

    prefetch = None if prefetch_bytes is None else size_option("--prefetch-bytes", prefetch_bytes, at_least=0)
    resident = None if resident_bytes is None else size_option("--resident-bytes", resident_bytes, at_least=0)
    files = RunFiles(trace=trace)
    on_stdout = files.check(as_json=as_json)
    from bigload.bench.run_document import run_stats_document
    from bigload.bench.run_stats import run_forwards
    from bigload.planning.plan_file import open_planned, read_plan
    from bigload_cli.views import run_stats as view

    planned = None if plan is None else read_plan(plan)
    checkpoint = open_planned(planned, path, source=str(plan))
    with output.status_line(quiet=quiet) as on_run:
        report = run_forwards(
            checkpoint,
            planned,
            forwards=forwards,
            tokens=tokens,
            prefetch_bytes=prefetch,
            resident_bytes=resident,
            on_run=on_run,
        )
    document = run_stats_document(report)
    written = files.write(document, report.stats, name=checkpoint.name)
    if on_stdout:
        pass  # the answer is there
    elif as_json:
        output.print_json(document)
    elif quiet:
        output.print_text(f"{report.median_seconds:.6f}")
    else:
        output.print_text(view.headline(report, name=checkpoint.name) + "\n")
        output.print_table(view.forwards(report), color=color)
        output.print_text("\n".join(["", *view.closing(report)]))
    if not quiet:
        say_written(written)
