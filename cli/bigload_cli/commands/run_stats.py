"""`bigload run-stats`: cost of weight streaming, forward by forward."""

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
  bigload run-stats ./mixtral --tokens 512 --experts experts.json
  bigload run-stats ./llama-8b --resident-bytes 4GiB --tokens 128 --json

\b
WAITED is the time the model waited for weights, OVERLAP the share of fetch
time during which it computed. WEIGHTS is the peak size of streamed weights,
loaded or in flight.
"""


def run_stats(
    path: ModelArgument,
    plan: RunPlanOption = None,
    forwards: Annotated[int, typer.Option("--forwards", metavar="N", min=1, max=1000, help="Number of forwards.")] = 3,
    tokens: TokensOption = 1,
    prefetch_bytes: PrefetchBytesOption = None,
    resident_bytes: ResidentBytesOption = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a trace of all threads, for chrome://tracing or Perfetto."),
    ] = None,
    experts: Annotated[
        Path | None,
        typer.Option("--experts", metavar="FILE", help="Record how often each expert was used, for later runs."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Run a model a few times and show what weight streaming costs.

    PATH is the folder of a model of transformers, which has to be installed.
    """
    import json

    from bigload.bench.result_marks import MADE_BY_RUN
    from bigload.extras import require
    from bigload.planning.expert_stats import SCHEMA, ExpertStats
    from bigload_cli import output
    from bigload_cli.result_files import answers_on_stdout, check_results, say_written, write_results

    prefetch = None if prefetch_bytes is None else size_option("--prefetch-bytes", prefetch_bytes, at_least=0)
    resident = None if resident_bytes is None else size_option("--resident-bytes", resident_bytes, at_least=0)
    answers_on_stdout([trace, experts], as_json=as_json)
    on_stdout = check_results([trace], made_by=MADE_BY_RUN, as_json=as_json)
    on_stdout |= check_results([experts], made_by=SCHEMA, as_json=as_json)
    require("torch", asked_by="run-stats", extra="run")
    from bigload.bench.chrome_trace import run_trace
    from bigload.bench.document import run_stats_document
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
    models = {} if report.stats is None else {checkpoint.name: report.stats}
    uses = {} if report.stats is None else report.stats.experts
    recorded = ExpertStats(uses=uses)
    written = write_results([(trace, lambda: json.dumps(run_trace(models))), (experts, recorded.to_json)])
    if on_stdout:
        pass  # the trace or the record is the answer
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
