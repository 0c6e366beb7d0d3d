"""Background thread that loads queued blocks, and ends when idle or when its streamer is gone."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_IDLE_SECONDS = 5.0
"""Seconds that the thread waits for another block before it ends. The next block starts a new thread."""


class PrefetchThread:
    """Calls `work(owner, block)` for each block that is put, in a thread that does not keep `owner` alive."""

    def __init__(self, owner: object, work: Callable[[Any, Any], None]) -> None:
        self._queue: deque[Any] = deque()
        # `with` takes the lock itself: Ctrl-C inside of `Condition.__enter__`, which is Python, would leave it locked.
        self._lock = threading.RLock()
        self._changed = changed = threading.Condition(self._lock)
        self._owner = weakref.ref(owner, lambda _: _wake(changed))
        self._work = work
        self._thread: threading.Thread | None = None

    def put(self, block: object) -> None:
        """Have `block` worked on after all that were put before."""
        with self._lock:
            self._queue.append(block)
            self._changed.notify()
            if self._thread is None or not self._thread.is_alive():  # ended, or left behind in the parent by a fork
                self._thread = threading.Thread(target=self._run, name="bigload-fetch", daemon=True)
                self._thread.start()

    def has(self, block: object) -> bool:
        with self._lock:
            return block in self._queue

    def cancel(self, block: object) -> bool:
        """Return whether `block` had not been begun, and is not worked on any more."""
        with self._lock:
            if block in self._queue:
                self._queue.remove(block)
                return True
            return False

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._changed.wait_for(lambda: self._queue or self._owner() is None, _IDLE_SECONDS):
                    self._thread = None
                    return
                owner = self._owner()
                if owner is None:
                    return
                block = self._queue.popleft()
            self._work(owner, block)
            del block, owner  # which keep a model alive


def _wake(changed: threading.Condition) -> None:
    # Called by garbage collection, which can interrupt anything, so it may not wait. Then the thread ends when idle.
    if changed.acquire(blocking=False):
        changed.notify_all()
        changed.release()
