"""`bigload manifest`: write the manifest of a checkpoint that is there already."""

from __future__ import annotations

from pathlib import Path

from bigload_cli.options import COLOR, JSON, QUIET, ColorMode, argument, option

EPILOG = """\b
Examples:
  bigload manifest ./llama-70b
  bigload manifest ./llama-70b --force
  bigload manifest /mnt/models/llama-70b -o llama-70b.manifest.json

\b
It says what the files are now, and finds damage later. It is no signature:
whoever can change a file can write another manifest.
"""


def manifest(
    folder: str = argument(..., "DIR", "Folder of a checkpoint, in any format."),
    out: Path | None = option(None, "--output -o", "FILE", "Where to write it. Default: bigload-manifest.json in DIR."),
    force: bool = option(False, "--force", "Replace a manifest that describes other files."),
    io_threads: int | None = option(
        None, "--io-threads", "N", "Blocks read at one moment. Default: 4.", min=1, max=256
    ),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Write digests of a checkpoint's files and tensors.

    Every byte is read; files that came from the Hub are compared with its SHA-256. Nothing but the manifest is written,
    and an older one only if it says the same or less.
    """
    from bigload.layouts.verification.make_manifest import write_manifest
    from bigload_cli import output
    from bigload_cli.progress import shown_progress
    from bigload_cli.views import manifest as view

    with shown_progress(quiet=quiet) as on_progress:
        report = write_manifest(folder, out, force=force, threads=io_threads, on_progress=on_progress)
    output.print_answer(
        output.AnswerForm(as_json, quiet, color),
        lambda: view.document(report),
        str(report.path),
        lambda: view.lines(report),
    )
