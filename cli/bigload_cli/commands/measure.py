"""`bigload measure`: the profile of this machine."""

from __future__ import annotations

from pathlib import Path

from bigload_cli.options import COLOR, JSON, QUIET, ColorMode, argument, option

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
    path: str = argument(".", "[PATH]", "A folder, whose disk is read, or a checkpoint.", show_default=False),
    quick: bool = option(False, "--quick", "A few seconds instead of a minute, with more noise."),
    out: Path | None = option(None, "--out -o", "FILE", "Write the profile, too; - is stdout."),
    keep: bool = option(False, "--keep", "Keep the profile although other programs used the machine meanwhile."),
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
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
    with output.status_line(quiet=quiet) as show:
        found = measure_machine(path, effort=QUICK if quick else FULL, on_run=lambda what: show(f"measuring: {what}"))
    is_kept = keep or not found.is_disturbed
    kept = keep_profile(path, found.profile) if is_kept else None
    text = found.profile.to_json()
    written = write_results([(out, lambda: text)])
    if not on_stdout:  # else the profile is the answer
        output.print_answer(
            output.AnswerForm(as_json, quiet, color),
            lambda: json.loads(text),
            str(out or kept or ""),
            lambda: (f"{printable(found.hardware)}\n", view.figures(found.profile)),
        )
    if quiet:
        return
    for note in found.notes:
        output.say(f"note: {printable(note)}")
    if not is_kept:
        output.say(f"warning: {NOT_KEPT}")
    elif kept is None:
        output.say("warning: the profile is not kept: bigload's cache folder cannot be written to")
    say_written([*written, *([] if kept is None else [kept])])
