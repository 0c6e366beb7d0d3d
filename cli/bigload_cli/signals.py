"""Signals that end a command early; finished files stay, and unfinished ones are cleaned up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[list[int]]:
    """Let SIGTERM, which schedulers, systemd and torchrun send, end the block by KeyboardInterrupt as Ctrl-C does.

    What is given holds the signal's number once it came: that is how the two are told apart.
    """
    came: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
