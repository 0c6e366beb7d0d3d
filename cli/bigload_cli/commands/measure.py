"""`bigload measure`: the profile of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigload_cli.options import ColorMode, ColorOption, JsonOption, QuietOption

NOT_KEPT = "the profile is not kept for later plans: measure again when the machine is idle, or add --keep"

EPILOG = """\b
Examples:
  bigload measure --quick
  bigload measure ./llama-8b -o box.json
  bigload measure /data --json

\b
The profile is kept for later plans, one for this hardware and each file
system. WEIGHTS is what a token takes of a device's own memory, PRODUCTS are
those of large matrices, BLOCK is what the small operations of one block of a
transformer take. -q prints the name of the file that holds the profile.
Where other programs keep a tenth of the cores busy meanwhile, it is not kept.
"""


def measure(
    path: Annotated[
        str,
        typer.Argument(metavar="[PATH]", help="A folder, whose disk is read, or a checkpoint.", show_default=False),
    ] = ".",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds instead of half a minute, with more noise.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the profile, too; - is stdout.")
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the profile although other programs used the machine meanwhile.")
    ] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
    color: ColorOption = ColorMode.AUTO,
) -> None:
    """Measure this machine once: disk, RAM, CPU, GPUs.

    Reads a checkpoint of 1 GiB or more at PATH, else a file that is written there and removed.
    """
    import json

    from bigload.bench.rates.measure import FULL, QUICK, measure_machine
    from bigload.machine.profiles.machine_profile import SCHEMA
    from bigload.machine.profiles.profile_cache import keep_profile
    from bigload.plain_text import printable
    from bigload_cli import output
    from bigload_cli.result_files import check_results, is_stdout, say_written, write_results
    from bigload_cli.views import measure as view

    on_stdout = check_results([out], made_by=SCHEMA, as_json=as_json and not is_stdout(out))
    with output.status_line(quiet=quiet) as on_run:
        found = measure_machine(path, effort=QUICK if quick else FULL, on_run=on_run)
    is_kept = keep or not found.is_disturbed
    kept = keep_profile(path, found.profile) if is_kept else None
    text = found.profile.to_json()
    written = write_results([(out, lambda: text)])
    if on_stdout:
        pass  # the profile is the answer
    elif as_json:
        output.print_json(json.loads(text))
    elif quiet:
        output.print_text(str(out or kept or ""))
    else:
        output.print_text(f"{printable(found.hardware)}\n")
        output.print_table(view.figures(found.profile), color=color)
    if quiet:
        return
    for note in found.notes:
        output.say(f"note: {printable(note)}")
    if not is_kept:
        output.say(f"warning: {NOT_KEPT}")
    elif kept is None:
        output.say("warning: the profile is not kept: bigload's cache folder cannot be written to")
    say_written([*written, *([] if kept is None else [kept])])
