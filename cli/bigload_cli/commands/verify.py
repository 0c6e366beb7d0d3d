"""`bigload verify`: compare a folder with its manifest."""

from __future__ import annotations

from pathlib import Path

from bigload_cli.options import COLOR, JSON, QUIET, ColorMode, argument, option

EPILOG = """\b
Examples:
  bigload verify ./llama-70b.split
  bigload verify ./llama-70b.split --size-only
  bigload verify me/llama-70b-split
  bigload verify /mnt/models/llama-70b --manifest llama-70b.manifest.json
  bigload verify ./llama-70b.split --json | jq -r '.problems[].file'
"""


def verify(
    folder: str = argument(
        ..., "DIR", "What has a manifest, by bigload reshard, fetch or manifest: a folder, a location."
    ),
    size_only: bool = option(False, "--size-only", "Compare names and sizes; read nothing but the manifest."),
    manifest: Path | None = option(
        None, "--manifest", "FILE", "The manifest, where it is not in DIR (bigload manifest -o)."
    ),
    io_threads: int | None = option(
        None, "--io-threads", "N", "Blocks read at one moment. Default: 4, remote 16.", min=1, max=256
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Compare a folder with its manifest.

    Every byte is read: the manifest has a digest of every file and of every tensor. All differences are
    listed, down to the tensor; any of them ends with exit code 1.
    """
    from bigload.errors import DamagedOutputError
    from bigload.layouts.verification.verify import Level
    from bigload.layouts.verification.verify import verify as compare
    from bigload.machine.memory.process_memory import peak_bytes
    from bigload.plain_text import printable
    from bigload_cli import output
    from bigload_cli.failures import AnsweredError
    from bigload_cli.progress import shown_progress
    from bigload_cli.views import verify as view

    level = Level.SIZE if size_only else Level.FULL
    with shown_progress(quiet=quiet or size_only) as on_progress:
        report = compare(folder, level=level, manifest=manifest, threads=io_threads, on_progress=on_progress)
    peak = peak_bytes()
    for warning in report.warnings:
        output.say(f"warning: {printable(str(warning))}")
    if not as_json:
        report.check()
    output.print_answer(
        output.AnswerForm(as_json, quiet, color),
        lambda: view.document(report, peak_bytes=peak),
        folder,
        lambda: view.closing(report, peak_bytes=peak),
    )
    try:
        report.check()
    except DamagedOutputError as error:
        raise AnsweredError(error) from error
