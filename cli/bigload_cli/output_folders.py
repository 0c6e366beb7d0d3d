"""Runs that write a folder: the question before `--force` destroys something, and what an interruption leaves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from bigload.plain_text import PlainTable, printable
from bigload_cli.failures import ANSWER_IS_NO, FAILED, INTERRUPTED, NOTHING_IS_LEFT, TERMINATED, StoppedError
from bigload_cli.output import AnswerForm, print_answer, print_shown, say, say_shown

if TYPE_CHECKING:
    from bigload.layouts.resharding.preparation import PreparedReshard


def announce(pieces: Iterable[str | PlainTable], form: AnswerForm, *, dry_run: bool) -> None:
    """Print what is to be written: that is the answer of a dry run, and stands beside that of a real one."""
    if form.is_for_people:
        (print_shown if dry_run else say_shown)(pieces, color=form.color)


def deliver(
    out: Path, form: AnswerForm, *, document: Callable[..., object], closing: Callable[..., Iterable[str]] | None
) -> None:
    """Print what was done, for people by `closing`, unless it was a dry run; both are given the peak memory."""
    from bigload.machine.memory.process_memory import peak_bytes

    peak = peak_bytes()
    if closing is not None and form.is_for_people:
        say("")
    print_answer(
        form,
        lambda: document(peak_bytes=peak),
        str(out),
        lambda: ["\ndry run: nothing was written"] if closing is None else closing(peak_bytes=peak),
    )


def say_lack_of_space(prepared: PreparedReshard) -> None:
    """Warn after a dry run if the disk has too little room."""
    error = prepared.lack_of_space
    if error is not None:
        say(f"warning: {printable('; '.join([error.message, *error.details]))}")
        raise typer.Exit(ANSWER_IS_NO)


def confirm(prepared: PreparedReshard, *, yes: bool, may_ask: bool = True) -> None:
    """Ask once whether to destroy what `--force` destroys, if there is anything."""
    from bigload.errors import OutputExistsError
    from bigload_cli.views.reshard import destroyed

    prepared.check_space()
    what = destroyed(prepared)
    if what is None or yes:
        return
    if not (may_ask and sys.stdin.isatty() and sys.stderr.isatty()):
        raise OutputExistsError(prepared.out, f"--force would {what}", hint="add --yes to let it")
    try:
        is_agreed = typer.confirm(f"{what[:1].upper()}{what[1:]}?", err=True)
    except typer.Abort:  # Ctrl-C or Ctrl-D
        raise KeyboardInterrupt from None
    if not is_agreed:
        raise StoppedError(FAILED, "nothing was changed")


@contextmanager
def interruptible(prepared: PreparedReshard, *, how: str) -> Iterator[None]:
    """Write in this context; Ctrl-C and SIGTERM, which schedulers, systemd and torchrun send, end it alike."""
    came: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise _stopped(prepared, TERMINATED if came else INTERRUPTED, how) from None
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _stopped(prepared: PreparedReshard, code: int, how: str) -> StoppedError:
    from bigload_cli.views.reshard import kept

    words = kept(prepared)
    if words is None:
        return StoppedError(code, NOTHING_IS_LEFT)
    return StoppedError(code, words, hint=how)
