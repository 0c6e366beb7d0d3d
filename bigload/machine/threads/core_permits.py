"""Permits to compute, one for each core, for threads that compute and wait for a disk in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bigload.machine.threads.thread_pool import usable_cores


class CorePermits:
    """As many threads compute at a time as this process has cores; the others wait for their turn.

    A disk ends the requests of several threads together. If they then share the cores, all are ready late, and the disk
    has nothing to do meanwhile; if they take turns, the first are back at the disk while the others compute.
    """

    def __init__(self) -> None:
        self._permits = threading.Semaphore(usable_cores())
        self._thread = threading.local()  # `computes`

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Compute, or copy memory, in this context, with a permit."""
        with self._permits:
            self._thread.computes = True
            try:
                yield
            finally:
                self._thread.computes = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for a disk in this context, without the permit that this thread may have."""
        if not getattr(self._thread, "computes", False):
            yield
            return
        self._permits.release()
        try:
            yield
        finally:
            self._permits.acquire()
