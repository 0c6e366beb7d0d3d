"""Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing when quiet."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta

from bigload.loading.progress import OnProgress, Progress, ignore_progress
from bigload.plain_text import printable
from bigload.units import format_rate, format_size
from bigload_cli.output import LINE_EVERY_SECONDS, make_console, say

_LINE_EVERY_PART = 0.1
_LINE_AT_MOST_EVERY_SECONDS = 1
_DRAWN_PER_SECOND = 8
_LEAST_EVENTS = 20
_LEAST_SECONDS = 30
"""Before a rate is that of all connections: so many events have come, or so many seconds gone."""


@contextmanager
def shown_progress(*, quiet: bool) -> Iterator[OnProgress]:
    """Give the callback that shows progress, in the form that stderr calls for."""
    if quiet:
        yield ignore_progress
    elif sys.stderr.isatty():
        with _bar() as on_progress:
            yield on_progress
    else:
        yield _lines()


@contextmanager
def _bar() -> Iterator[OnProgress]:
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        BarColumn(bar_width=12),
        TextColumn("{task.fields[amount]}", table_column=Column(no_wrap=True, min_width=1)),
        TextColumn("{task.fields[pace]}", table_column=Column(no_wrap=True, min_width=1)),
    )
    pace = _Pace()
    console = make_console(sys.stderr, width=_bar_width())
    with Bar(*columns, console=console, transient=True, expand=True, refresh_per_second=_DRAWN_PER_SECOND) as bar:
        task = bar.add_task("starting", total=1, amount="", pace="")

        shown: tuple[str, float] = "", 0.0

        def on_progress(progress: Progress) -> None:
            nonlocal shown
            phase, at = shown
            is_same = progress.phase == phase and progress.done_bytes < progress.total_bytes
            if is_same and time.monotonic() - at < 1 / _DRAWN_PER_SECOND:
                return  # a fast line brings thousands of chunks a second
            shown = progress.phase, time.monotonic()
            console.width = _bar_width()
            bar.update(
                task,
                description=_what(progress, usual=("read", "write")),
                total=progress.total_bytes,
                completed=progress.done_bytes,
                amount=_amount(progress),
                pace=" ".join(pace.of(progress)),
            )

        yield on_progress


def _bar_width() -> int:
    """Return the columns for a bar: on a full line, the ^C that a terminal echoes would begin another one."""
    return max(os.get_terminal_size(sys.stderr.fileno()).columns - len("^C") - 1, 1)


def _lines() -> OnProgress:
    shown_at = time.monotonic()
    shown_part = 0.0
    pace = _Pace()

    def on_progress(progress: Progress) -> None:
        nonlocal shown_at, shown_part
        now, part = time.monotonic(), progress.done_bytes / (progress.total_bytes or 1)
        words = pace.of(progress)
        is_due = part - shown_part >= _LINE_EVERY_PART and now - shown_at >= _LINE_AT_MOST_EVERY_SECONDS
        if not is_due and now - shown_at < LINE_EVERY_SECONDS:
            return
        shown_at, shown_part = now, part
        say("  ".join([f"{part:4.0%}", _amount(progress), *words, _what(progress)]))

    return on_progress


class _Pace:
    """Bytes per second since the phase began, and time left: what is read back goes faster than what is written.

    Nothing is said at first, when small files are done and each of many connections has only begun a window.
    """

    def __init__(self) -> None:
        self._phase = ""
        self._num_events = 0
        self._began = self._last = (0, time.monotonic())

    def of(self, progress: Progress) -> list[str]:
        """Return the rate and the time left in words; each event has to come by here."""
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase, self._began, self._num_events = progress.phase, self._last, 0
        self._num_events += 1
        self._last = (progress.done_bytes, now)
        done, seconds = progress.done_bytes - self._began[0], now - self._began[1]
        if not done or not seconds or (self._num_events < _LEAST_EVENTS and seconds < _LEAST_SECONDS):
            return []
        left = timedelta(seconds=round((progress.total_bytes - progress.done_bytes) * seconds / done))
        return [format_rate(done, seconds), *([f"{left} left"] if left else [])]


def _what(progress: Progress, *, usual: Collection[str] = ()) -> str:
    file = printable(progress.file)
    return file if progress.phase in usual else f"{progress.phase} {file}"


def _amount(progress: Progress) -> str:
    return f"{format_size(progress.done_bytes)} of {format_size(progress.total_bytes)}"
