"""`bigload fetch`: a model copied to this machine, whole or in part."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigload_cli.failures import named_as_options
from bigload_cli.options import (
    COLOR,
    DRY_RUN,
    FORCE,
    IO_THREADS,
    JSON,
    MAX_IN_FLIGHT,
    QUIET,
    TP,
    TP_RULES,
    YES,
    ColorMode,
    argument,
    bytes_in_flight,
    option,
)
from bigload_cli.output_folders import announce, confirm, deliver, interruptible, say_lack_of_space

if TYPE_CHECKING:
    from bigload.layouts.fetching.fetch import FetchReport, PreparedFetch

EPILOG = """\b
Examples:
  bigload fetch org/model --dry-run
  bigload fetch org/model /models/llama-70b
  bigload fetch org/model ./layers --only 'model.layers.*'
  bigload fetch org/model ./gpu0 --plan plan.json --device cuda:0
  bigload fetch org/model ./rank3 --rank 3 --tp 8
  bigload fetch org/model ./texts --exclude '*.safetensors'

\b
Left out, unless --include names them: other forms of the same weights (torch
files beside safetensors, GGUF, original/, onnx/), states of a training and
hidden files. Of a file of which less than 90 % is needed, only the byte
ranges of its tensors are transferred.

\b
An interrupted fetch (Ctrl-C, SIGTERM, a crash, a full disk, a lost network)
keeps what it has in OUT.partial; the same command reads it back and goes on.
"""

_OPTIONS = {"threads": "--io-threads", "max_inflight": "--max-memory-in-flight"}
"""Options of other names than the arguments of `bigload.fetch`."""


def fetch(
    model: str = argument(..., "MODEL", "org/model[@revision], or what bigload inspect takes."),
    out: Path | None = argument(None, "OUT", "Folder to make; must not exist or be empty. Default: named like MODEL."),
    only: list[str] | None = option(
        None, "--only", "NAME", "Only these tensors or modules: 'model.layers.*'. Repeatable."
    ),
    plan: Path | None = option(None, "--plan", "FILE", "Only what this plan puts on --device."),
    device: list[str] | None = option(None, "--device", "DEVICE", "Device of the plan: cuda:0. Repeat for more."),
    rank: int | None = option(None, "--rank", "R", "Only the slices of this tensor-parallel rank.", min=0),
    tp: int | None = TP,
    tp_rules: Path | None = TP_RULES,
    include: list[str] | None = option(None, "--include", "PATTERN", "Only files of these names. Repeat for more."),
    exclude: list[str] | None = option(None, "--exclude", "PATTERN", "No files of these names. Repeat for more."),
    force: bool = FORCE,
    yes: bool = YES,
    dry_run: bool = DRY_RUN,
    max_memory_in_flight: str | None = MAX_IN_FLIGHT,
    io_threads: int | None = IO_THREADS,
    as_json: bool = JSON,
    quiet: bool = QUIET,
    color: ColorMode = COLOR,
) -> None:
    """Copy a model to this machine, whole or in part.

    It comes from the Hub or elsewhere: all of it, or only what a device, a rank or some modules need.
    OUT appears when everything in it is written and verified. A part is a checkpoint too, and says what it is a part
    of.
    """
    from bigload.layouts.fetching.fetch import prepare_fetch
    from bigload.layouts.fetching.options import DEFAULT_MAX_INFLIGHT, FetchOptions
    from bigload_cli.output import AnswerForm, say_warnings
    from bigload_cli.views import fetch as view

    in_flight = bytes_in_flight(max_memory_in_flight, DEFAULT_MAX_INFLIGHT)
    with named_as_options(_OPTIONS):
        options = FetchOptions(
            only=tuple(only or ()),
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            plan=plan,
            devices=tuple(device or ()),
            rank=rank,
            tp=tp,
            tp_rules=tp_rules,
            force=force,
            threads=io_threads,
            max_inflight=in_flight,
        )
        prepared = prepare_fetch(model, out, options)
    form = AnswerForm(as_json, quiet, color)
    say_warnings(prepared.run.checkpoint)
    announce(view.announced(prepared, dry_run=dry_run), form, dry_run=dry_run)
    report = None if dry_run else _run(prepared, yes=yes, quiet=quiet)
    deliver(
        prepared.run.out,
        form,
        document=partial(view.document, prepared, report),
        closing=None if report is None else partial(view.closing, prepared, report),
    )
    if dry_run:
        say_lack_of_space(prepared.run)


def _run(prepared: PreparedFetch, *, yes: bool, quiet: bool) -> FetchReport:
    from bigload.layouts.fetching.fetch import run_fetch
    from bigload_cli.progress import shown_progress

    if prepared.run.options.force and not prepared.run.is_finished:
        confirm(prepared.run, yes=yes)
    with (
        shown_progress(quiet=quiet) as on_progress,
        interruptible(prepared.run, how="run the same command to go on"),
    ):
        return run_fetch(prepared, on_progress=on_progress)
