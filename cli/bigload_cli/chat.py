"""Lines of a conversation: read from a terminal or a pipe, with Ctrl-C for what is going on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from bigload.errors import OptionError
from bigload_cli.output import say

_MARK = ">>> "
_ENDS = ("/exit", "/bye", "/quit")


def typed_lines() -> Iterator[str]:
    """Yield lines until the input ends or one asks for the end; a terminal is asked for each."""
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = _line(is_terminal=is_terminal)
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            say("\n/exit or Ctrl-D ends the chat.")
            continue
        except EOFError:
            if is_terminal:
                say("")
            return
        if line.strip() in _ENDS:
            return
        if line.strip():
            yield line.rstrip("\n")


def stdin_text() -> str:
    """Return all of stdin, less the line feed at its end."""
    with _decoding_errors():
        return sys.stdin.read().removesuffix("\n")


@contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Give what says whether Ctrl-C was pressed in the block; a second one interrupts at once, as everywhere else.

    An interrupt inside a forward would leave its weights half loaded, so the first one waits for the token at hand.
    """
    is_stopped = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal is_stopped
        if is_stopped:
            signal.default_int_handler(number, frame)
        is_stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: is_stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _line(*, is_terminal: bool) -> str:
    """Return the next line.

    Raises:
        EOFError: there is none.
    """
    with _decoding_errors():
        if is_terminal and sys.stdout.isatty():
            import readline  # noqa: F401 - gives input() a line editor and a history

            return input(_MARK)
        if is_terminal:  # the answers go to a file
            sys.stderr.write(_MARK)
            sys.stderr.flush()
        line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


@contextmanager
def _decoding_errors() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise OptionError(f"what stdin gives is no text in {error.encoding}: {error.reason}") from error
