"""Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bigload.loading.events import OnProgress, Progress, ignore_progress
from bigload.units import format_rate, format_size
from bigload_cli.output import make_console, say

_LINE_EVERY_SECONDS = 30
_LINE_EVERY_PART = 0.1
_LINE_AT_MOST_EVERY_SECONDS = 1


@contextmanager
def shown_progress(*, quiet: bool, passes: int) -> Iterator[OnProgress]:
    """Give the callback that shows progress, in the form that stderr calls for.

    `passes` says how often the progress counts each byte; people are shown the bytes of the checkpoint.
    """
    if quiet:
        yield ignore_progress
    elif sys.stderr.isatty():
        with _bar(passes) as on_progress:
            yield on_progress
    else:
        yield _lines(passes)


@contextmanager
def _bar(passes: int) -> Iterator[OnProgress]:
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[amount]}", table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[rate]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True),
    )
    began = time.monotonic()
    with Bar(*columns, console=make_console(sys.stderr), transient=True, expand=True, refresh_per_second=8) as bar:
        task = bar.add_task("starting", total=1, amount="", rate="")

        def on_progress(progress: Progress) -> None:
            bar.update(
                task,
                description=progress.file,
                total=progress.total_bytes,
                completed=progress.done_bytes,
                amount=_amount(progress, passes),
                rate=format_rate(progress.done_bytes // passes, time.monotonic() - began),
            )

        yield on_progress


def _lines(passes: int) -> OnProgress:
    began = shown_at = time.monotonic()
    shown_part = 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal shown_at, shown_part
        now, part = time.monotonic(), progress.done_bytes / (progress.total_bytes or 1)
        is_due = part - shown_part >= _LINE_EVERY_PART and now - shown_at >= _LINE_AT_MOST_EVERY_SECONDS
        if not is_due and now - shown_at < _LINE_EVERY_SECONDS:
            return
        shown_at, shown_part = now, part
        rate = format_rate(progress.done_bytes // passes, now - began)
        say(f"{part:4.0%}  {_amount(progress, passes)}  {rate}  {progress.phase} {progress.file}")

    return on_progress


def _amount(progress: Progress, passes: int) -> str:
    return f"{format_size(progress.done_bytes // passes)} of {format_size(progress.total_bytes // passes)}"
