"""Where words go and in which form: answers to stdout, the rest to stderr, colours only where they can be seen."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import typer

from bigload_cli.options import ColorMode

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_UNLIMITED_WIDTH = 10_000


def print_json(document: object) -> None:
    """Print one JSON document: indented for people, on one line for programs."""
    indent = 2 if sys.stdout.isatty() else None
    _write(json.dumps(document, indent=indent, ensure_ascii=False) + "\n")


def print_text(text: str) -> None:
    """Print a line of the answer."""
    _write(text + "\n")


def print_answer(renderable: RenderableType, *, color: ColorMode) -> None:
    """Print a table: as wide as the terminal, or as wide as its content where there is none."""
    console = make_console(sys.stdout, color)
    with console.capture() as capture:
        console.print(renderable)
    _write("\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n")


def say(text: str) -> None:
    """Print a line beside the answer: a note, a warning, progress."""
    typer.echo(text, err=True)


def make_console(stream: TextIO, color: ColorMode = ColorMode.AUTO) -> Console:
    """Return the one kind of console that bigload writes to.

    Markup, emoji and highlighting are off: `./model[v2]` is a path and `:fire:` is not a picture.
    """
    from rich.console import Console

    return Console(
        file=stream,
        width=None if stream.isatty() else _UNLIMITED_WIDTH,
        force_terminal=has_color(stream, color) or None,
        no_color=not has_color(stream, color),
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=False,
    )


def has_color(stream: TextIO, color: ColorMode) -> bool:
    """Return whether to colour `stream`: asked for, or a terminal and neither NO_COLOR nor TERM=dumb objects."""
    if color is not ColorMode.AUTO:
        return color is ColorMode.ALWAYS
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def can_draw(stream: TextIO) -> bool:
    """Return whether `stream` can take block characters, or wants ASCII."""
    try:
        "█▏├".encode(stream.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def can_draw_on_stdout() -> bool:
    """Return whether answers can have block characters."""
    return can_draw(sys.stdout)


@contextmanager
def status_line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give what shows a few words on stderr: in one place on a terminal, a line each elsewhere, nothing when quiet."""
    if quiet or not sys.stderr.isatty():
        yield (lambda _words: None) if quiet else say
        return
    with make_console(sys.stderr).status("") as status:
        yield status.update


def _write(text: str) -> None:
    try:
        if not can_draw(sys.stdout):
            text = text.encode(sys.stdout.encoding or "ascii", "replace").decode(sys.stdout.encoding or "ascii")
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` for one, has what it wants. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
