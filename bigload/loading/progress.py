"""Progress of a running load or reshard, reported to a callback. The library prints nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`done_bytes` of `total_bytes` are through; `file` is the current one.

    `phase` is `read`, `write` (and compared, where that is asked for), `check` (of what an interrupted run left) or
    `verify`. Each byte counts once. A reshard or fetch of a remote checkpoint counts bytes to read, as they come.
    """

    phase: str
    file: str
    done_bytes: int
    total_bytes: int


OnProgress = Callable[[Progress], None]
"""Called from worker threads, one call at a time, at most once per finished piece of work or chunk that has come."""


def ignore_progress(progress: Progress) -> None:
    """Do nothing: the default callback."""


class Tally:
    """Counts bytes from several threads and reports them, one call at a time; never more than `total_bytes`."""

    def __init__(self, total_bytes: int, on_progress: OnProgress, *, done_bytes: int = 0) -> None:
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._done_bytes = done_bytes
        self._last = "", ""
        self._lock = threading.Lock()

    def add(self, num_bytes: int, *, phase: str, file: str) -> None:
        """Report `num_bytes` more of `file` as done."""
        with self._lock:
            self._done_bytes = min(self._done_bytes + num_bytes, self._total_bytes)
            self._last = phase, file
            done = Progress(phase=phase, file=file, done_bytes=self._done_bytes, total_bytes=self._total_bytes)
            self._on_progress(done)

    def finish(self) -> None:
        """Report that all is done, if less was counted: bytes of which something was kept, or read for nothing."""
        phase, file = self._last
        if file and self._done_bytes < self._total_bytes:
            self.add(self._total_bytes - self._done_bytes, phase=phase, file=file)
