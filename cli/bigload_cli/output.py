"""Streams of the program: answers to stdout, the rest to stderr, colours only on terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, TextIO

import typer

from bigload.plain_text import PlainTable, printable
from bigload_cli.options import ColorMode

if TYPE_CHECKING:
    from rich.console import Console

    from bigload.checkpoint.model import Checkpoint

LINE_EVERY_SECONDS = 30
"""Of progress, where stderr is no terminal."""

SHOWN_AFTER_SECONDS = 1
"""Before headers of a remote checkpoint are counted on stderr."""

_UNLIMITED_WIDTH = 10_000
_BLANKS_AT_LINE_END = re.compile(r"[ ]+((?:\x1b\[[0-9;]*m)*)$", re.MULTILINE)
_ASCII = str.maketrans({"±": "+-", "…": "..", "σ": "sd", "×": "x"})


class AnswerForm(NamedTuple):
    """Form of an answer: a document for programs, the one value that a script wants, or lines and tables for people."""

    as_json: bool
    quiet: bool
    color: ColorMode

    @property
    def is_for_people(self) -> bool:
        """Whether lines and tables are printed, and what belongs beside them."""
        return not (self.as_json or self.quiet)


def print_answer(
    form: AnswerForm,
    document: Callable[[], object],
    value: str | None,
    shown: Callable[[], Iterable[str | PlainTable]],
) -> None:
    """Print an answer in the form that was asked for; without a `value`, a script has the exit code alone."""
    if form.as_json:
        print_json(document())
    elif not form.quiet:
        print_shown(shown(), color=form.color)
    elif value is not None:
        print_text(value)


def print_shown(pieces: Iterable[str | PlainTable], *, color: ColorMode) -> None:
    """Print lines and tables of the answer."""
    for piece in pieces:
        print_text(piece) if isinstance(piece, str) else print_table(piece, color=color)


def say_shown(pieces: Iterable[str | PlainTable], *, color: ColorMode) -> None:
    """Print lines and tables beside the answer."""
    for piece in pieces:
        say(piece) if isinstance(piece, str) else say_table(piece, color=color)


def print_json(document: object) -> None:
    """Print one JSON document: indented for people, on one line for programs."""
    indent = 2 if sys.stdout is not None and sys.stdout.isatty() else None
    _write(json.dumps(document, indent=indent, ensure_ascii=not can_draw(sys.stdout)) + "\n", sys.stdout)


def print_text(text: str) -> None:
    """Print lines of the answer, folded at words where a terminal is narrower."""
    _write(_folded(text, sys.stdout) + "\n", sys.stdout)


def print_piece(text: str) -> None:
    """Print a piece of the answer as it comes; on a terminal, codes that it would obey are written out."""
    if sys.stdout is not None and sys.stdout.isatty():
        text = "".join(char if char in "\n\t" else printable(char) for char in text)
    _write(text, sys.stdout)


def print_table(table: PlainTable, *, color: ColorMode) -> None:
    """Print a table of the answer; never narrower than its figures."""
    _write(_drawn(table, sys.stdout, color), sys.stdout)


def say(text: str) -> None:
    """Print lines beside the answer: notes, warnings, progress."""
    _write(_folded(text, sys.stderr) + "\n", sys.stderr)


def say_warnings(checkpoint: Checkpoint) -> None:
    """Print what is odd about a checkpoint beside the answer."""
    for warning in checkpoint.warnings:
        say(f"warning: {printable(warning.text)}")


def open_shown(path: str, *, quiet: bool) -> Checkpoint:
    """Open a checkpoint, and show how many headers have come if it is remote and that takes long."""
    from bigload.checkpoint.source import open_checkpoint

    began, show = time.monotonic(), None
    with ExitStack() as stack:  # a line is cleared only if there was one

        def on_header(done: int, total: int) -> None:
            nonlocal show
            if time.monotonic() - began >= SHOWN_AFTER_SECONDS:
                show = show or stack.enter_context(status_line(quiet=quiet))
                show(f"read {done} of {total} headers")

        return open_checkpoint(path, on_header=on_header, trusts_recent=True)


def warning_shower(usual: Callable[..., None]) -> Callable[..., None]:
    """Return a function for `warnings.showwarning` that says warnings of bigload as the program says all else."""

    def show(message: Warning | str, category: type[Warning], *place: object) -> None:
        if category.__module__.partition(".")[0] == "bigload":
            say(f"warning: {printable(str(message))}")
        else:
            usual(message, category, *place)

    return show


def say_table(table: PlainTable, *, color: ColorMode) -> None:
    """Print a table beside the answer."""
    _write(_drawn(table, sys.stderr, color), sys.stderr)


@contextmanager
def status_line(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give what shows a few words on stderr: one line on a terminal, now and then a line elsewhere, none when quiet.

    No thread draws: what is shown between two calls stays as it is, and takes no time of what is measured there.
    """
    if quiet:
        yield lambda _words: None
    elif not sys.stderr.isatty():
        yield _occasionally(say)
    else:
        try:
            yield lambda words: _write(f"\r{_fitting(words)}\x1b[K", sys.stderr)
        finally:
            _write("\r\x1b[K", sys.stderr)


def _fitting(words: str) -> str:
    return printable(words)[: max(shutil.get_terminal_size().columns - 1, 1)]


def _occasionally(show: Callable[[str], None]) -> Callable[[str], None]:
    """Return what shows the first words, and then words of at most every half minute."""
    shown_at = None

    def show_if_due(words: str) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if shown_at is None or now - shown_at >= LINE_EVERY_SECONDS:
            shown_at = now
            show(words)

    return show_if_due


def make_console(stream: TextIO, color: ColorMode = ColorMode.AUTO, *, width: int | None = None) -> Console:
    """Return the one kind of console that bigload writes to.

    Markup, emoji and highlighting are off: `./model[v2]` is a path and `:fire:` is not a picture.
    """
    from rich.console import Console

    return Console(
        file=stream,
        width=width,
        color_system="auto" if has_color(stream, color) else None,
        no_color=False,  # has_color() has decided; rich would look at NO_COLOR again
        force_terminal=True if has_color(stream, color) else None,
        markup=False,
        emoji=False,
        highlight=False,
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


def can_draw(stream: TextIO | None) -> bool:
    """Return whether `stream` can take block characters, or wants ASCII."""
    try:
        "█▏├".encode(getattr(stream, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def can_draw_on_stdout() -> bool:
    """Return whether answers can have block characters."""
    return can_draw(sys.stdout)


def _drawn(table: PlainTable, stream: TextIO | None, color: ColorMode) -> str:
    if stream is None:
        return ""
    from bigload_cli.views.table import for_terminal, has_many_rows

    if has_many_rows(table) or not (stream.isatty() or has_color(stream, color)):
        return table.as_text()
    terminal_width = shutil.get_terminal_size().columns if stream.isatty() else _UNLIMITED_WIDTH
    drawing, width = for_terminal(table, terminal_width)
    console = make_console(stream, color, width=width)
    with console.capture() as capture:
        console.print(drawing)
    return _BLANKS_AT_LINE_END.sub(r"\1", capture.get())


def _folded(text: str, stream: TextIO | None) -> str:
    """Fold lines that are longer than the terminal, except commands, which are there to be copied."""
    if stream is None or not stream.isatty():
        return text
    import textwrap

    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        if len(line) <= width or line.startswith("Next:"):
            lines.append(line)
        else:
            lines += textwrap.wrap(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def print_bytes(content: bytes) -> None:
    """Print a file that is the answer, byte for byte."""
    stream = sys.stdout
    if stream is None:
        return
    with _write_errors(stream):
        stream.flush()
        stream.buffer.write(content)
        stream.buffer.flush()


def _write(text: str, stream: TextIO | None) -> None:
    if stream is None:  # closed by whoever started us
        return
    encoding = stream.encoding or "ascii"
    if not can_draw(stream):
        text = text.translate(_ASCII)
    with _write_errors(stream):
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


@contextmanager
def _write_errors(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # Python would complain again when it flushes at exit.
        _silence(stream)
        if stream is sys.stderr:  # what stands beside the answer must not stop the work
            return
        if isinstance(error, BrokenPipeError):  # the reader, `head` for one, has what it wants
            raise typer.Exit(0) from None
        from bigload.errors import BigloadError

        raise BigloadError(f"cannot write the answer: {error.strerror or error}") from error


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
