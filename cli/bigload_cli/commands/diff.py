"""`bigload diff`: what is different in two checkpoints."""

from __future__ import annotations

import typer

from bigload_cli.options import COLOR, JSON, QUIET, ColorMode, argument, option

EPILOG = """\b
Examples:
  bigload diff ./llama-8b ./llama-8b.tuned
  bigload diff org/model@main org/model@v1 --json | jq -r '.changed[].name'
  bigload diff ./model ./model.bf16 -q

\b
Exit code 0: the same tensors, dtypes and bytes; 1: something differs.
Files, their formats and sizes, and what lies beside them, are not compared.
Digests are those of bigload-manifest.json, of files not written to since.
"""


def diff(
    first: str = argument(..., "A", "What bigload inspect takes."),
    second: str = argument(..., "B", "The other one."),
    compare_bytes: bool = option(
        False, "--bytes", "Read all tensors, also those that both manifests have the same digest of."
    ),
    io_threads: int | None = option(
        None,
        "--io-threads",
        "N",
        "Threads that read and compare. Default: 8, of cached files one per core.",
        min=1,
        max=256,
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Compare the tensors of two checkpoints.

    By name, whatever files they are in: shapes and dtypes, then digests where both have manifests, then values. Where
    dtypes differ, values are compared in float32.
    """
    from bigload.layouts.differences import diff as compare
    from bigload_cli import output
    from bigload_cli.progress import shown_progress
    from bigload_cli.views import diff as view

    with shown_progress(quiet=quiet or as_json) as on_progress:
        report = compare(first, second, trust_digests=not compare_bytes, threads=io_threads, on_progress=on_progress)
    form = output.AnswerForm(as_json, quiet, color)
    output.print_answer(form, document=lambda: view.document(report), value=None, shown=lambda: view.shown(report))
    if not report.is_equal:
        raise typer.Exit(1)
