"""`bigload manifest`: write the manifest of a checkpoint that is there already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigload_cli.options import ColorMode, ColorOption, JsonOption, QuietOption

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
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder of a checkpoint, in any format.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Where to write it. Default: bigload-manifest.json in DIR."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a manifest that describes other files.")] = False,
    io_threads: Annotated[
        int | None,
        typer.Option("--io-threads", metavar="N", min=1, max=256, help="Blocks read at one moment. Default: 4."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,  # noqa: ARG001 - every verb takes it; this one has no table
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
    if as_json:
        output.print_json(view.document(report))
    else:
        output.print_text(str(report.path) if quiet else "\n".join(view.lines(report)))
