"""`bigload reshard`: carry out a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigload_cli.options import ColorMode, ColorOption, JsonOption, QuietOption, ThreadsOption, size_option

EPILOG = """\b
Examples:
  bigload reshard plan.json ./llama-70b.split --dry-run
  bigload reshard plan.json ./llama-70b.split
  bigload reshard plan.json /fast/llama-70b.split --max-shard-size 2GB --source /slow/llama-70b
"""


def reshard(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, as bigload plan -o writes it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; must not exist or be empty.")],
    source: Annotated[
        str | None, typer.Option("--source", metavar="PATH", help="The checkpoint, if not where the plan says.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Begin another file before this size.")
    ] = "5GB",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Read everything back and compare it with the source.")
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, list the files, write nothing.")
    ] = False,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Rewrite a checkpoint into one folder per device.

    Each device then reads only its own bytes. OUT appears when everything in it is written, flushed and verified; the
    source is never touched.
    """
    from bigload.bench.peak_memory import peak_bytes
    from bigload.layouts.reshard import prepare_reshard, run_reshard
    from bigload_cli import output
    from bigload_cli.progress import shown_progress

    max_shard_bytes = size_option("--max-shard-size", max_shard_size)
    prepared = prepare_reshard(plan, out, checkpoint=source, max_shard_bytes=max_shard_bytes)
    is_for_people = not as_json and not quiet
    if is_for_people:
        from bigload_cli.views import reshard as view

        # What a dry run finds is its answer; before a real run the same is an announcement.
        text, table = (output.print_text, output.print_table) if dry_run else (output.say, output.say_table)
        text(view.headline(prepared) + "\n")
        table(view.files(prepared) if dry_run else view.folders(prepared), color=color)
    report = None
    if not dry_run:
        with shown_progress(quiet=quiet, passes=2 if verify else 1) as on_progress:
            report = run_reshard(prepared, verify=verify, threads=threads, on_progress=on_progress)
    peak = peak_bytes()
    if as_json:
        from bigload_cli.views import documents

        output.print_json(documents.of_reshard(prepared, report, peak_bytes=peak))
    elif not is_for_people:
        output.print_text(str(out))
    elif report is None:
        output.print_text("\ndry run: nothing was written")
    else:
        num_tensors = sum(len(written.tensors) for written in prepared.files)
        output.say("")
        output.print_text("\n".join(view.closing(report, num_tensors=num_tensors, peak_bytes=peak)))
