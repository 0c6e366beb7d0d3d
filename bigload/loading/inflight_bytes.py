"""A bound on bytes that are on their way, whatever the number of threads that carry them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bigload.loading.report import Phase, Recorder


class InflightBytes:
    """Lets threads hold at most `limit` bytes at one moment; a single piece of work larger than that goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held = 0
        self._freed = threading.Condition()

    @contextmanager
    def hold(self, num_bytes: int, recorder: Recorder) -> Iterator[None]:
        """Wait until there is room for `num_bytes`, and keep them as long as the context lasts."""
        with self._freed:
            if not self._has_room(num_bytes):
                with recorder.span(Phase.WAIT):
                    self._freed.wait_for(lambda: self._has_room(num_bytes))
            self._held += num_bytes
        try:
            yield
        finally:
            with self._freed:
                self._held -= num_bytes
                self._freed.notify_all()

    def _has_room(self, num_bytes: int) -> bool:
        return self._held == 0 or self._held + num_bytes <= self._limit
