"""`bigload bench-run`: a model under a plan, against the same model in memory and against other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from bigload.bench.run_report import RunReport

EPILOG = """\b
Examples:
  bigload bench-run ./llama-8b
  bigload bench-run ./llama-8b --plan plan.json --tokens 128 --cold
  bigload bench-run ./llama-8b --new-tokens 32 --rounds 3 --json
  bigload bench-run ./llama-8b --resident-bytes 0 --prefetch-bytes 1GiB --trace trace.json

\b
plain is the model in memory, where it fits. accelerate and transformers run
by the same plan, where they are installed. BOUND is the longer of computing,
which is what plain takes, and a raw read of the bytes that bigload brings in,
measured by turns with the rest. Everyone gets the same tokens, and all have
to answer alike. Without --plan everything stays on the disk.
"""


def bench_run(
    path: ModelArgument,
    plan: RunPlanOption = None,
    tokens: TokensOption = 1,
    new_tokens: Annotated[
        int,
        typer.Option(
            "--new-tokens", metavar="N", min=0, max=100_000, help="Time the decoding of N tokens after it, KV cache on."
        ),
    ] = 0,
    rounds: Annotated[int, typer.Option("--rounds", metavar="R", min=1, max=1000, help="Turns of each.")] = 5,
    cold: Annotated[
        bool, typer.Option("--cold", help="Drop the files from the page cache before each run, and check it.")
    ] = False,
    prefetch_bytes: PrefetchBytesOption = None,
    resident_bytes: ResidentBytesOption = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Time accelerate and transformers, too.")] = True,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, max=1024, help="Threads that torch computes with.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write what bigload did, for chrome://tracing or Perfetto."),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the JSON document to a file as well; - is stdout."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Time a model whose weights are on disk: bigload, in memory, others.

    PATH is the folder of a model of transformers, which has to be installed.
    """
    from bigload_cli import output
    from bigload_cli.result_files import say_written
    from bigload_cli.views.run_files import RunFiles

    prefetch = None if prefetch_bytes is None else size_option("--prefetch-bytes", prefetch_bytes, at_least=0)
    resident = None if resident_bytes is None else size_option("--resident-bytes", resident_bytes, at_least=0)
    files = RunFiles(document=output_file, trace=trace)
    on_stdout = files.check(as_json=as_json)
    import torch

    from bigload.bench.bench_run import bench_run as run_bench
    from bigload.bench.run_document import bench_run_document
    from bigload.planning.plan_file import open_planned, read_plan

    if threads is not None:
        torch.set_num_threads(threads)
    planned = None if plan is None else read_plan(plan)
    checkpoint = open_planned(planned, path, source=str(plan))
    with output.status_line(quiet=quiet) as on_run:
        report = run_bench(
            checkpoint,
            planned,
            tokens=tokens,
            new_tokens=new_tokens,
            rounds=rounds,
            cold=cold,
            prefetch_bytes=prefetch,
            resident_bytes=resident,
            peers=peers,
            on_run=on_run,
        )
    document = bench_run_document(report)
    written = files.write(document, report.stats, name=checkpoint.name)
    if on_stdout:
        pass  # the answer is there
    elif as_json:
        output.print_json(document)
    elif quiet:
        output.print_text(f"{report.result_of_bigload.median_seconds:.6f}")
    else:
        _show(report, name=checkpoint.name, color=color)
    if not quiet:
        say_written(written)


def _show(report: RunReport, *, name: str, color: ColorMode) -> None:
    from bigload.plain_text import printable
    from bigload_cli import output
    from bigload_cli.views import bench_run as view

    output.print_text(view.headline(report, name=name) + "\n")
    output.print_table(view.runtimes(report), color=color)
    output.print_text("\n".join(["", *view.closing(report)]))
    for warning in report.warnings:
        output.say(f"warning: {printable(warning.text)}")
