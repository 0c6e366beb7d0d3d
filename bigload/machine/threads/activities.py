"""Activities of threads: what each does at a moment of a load or reshard that is traced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple


class Phase(StrEnum):
    """Activity of a thread at a moment of a load; the parts of it that are none of these are waiting.

    `read`: a system call brings bytes. `fault`: fresh memory, or pages of a map, are made ready. `copy`: bytes move
    in memory or to a device. `cast`: to another dtype. `assign`: tensors are made and put into a module. `wait`: for
    bytes in flight, or for a device.
    """

    READ = "read"
    FAULT = "fault"
    COPY = "copy"
    CAST = "cast"
    ASSIGN = "assign"
    WAIT = "wait"


class Activity(NamedTuple):
    """One stretch of one thread: `start` and `seconds` count from the beginning of the load."""

    phase: Phase
    thread: str
    start: float
    seconds: float
    num_bytes: int
    file: str


OnReceived = Callable[[int, str], None]
"""Called with the bytes that have come, and the name of their file, by the thread that reads them."""


class Recorder:
    """Keeps the activities of a load that is traced; does nothing, and costs next to nothing, for one that is not.

    A traced load faults memory in before it reads into it, which separates faults from reads; otherwise the reads fault
    it in, which is faster. `on_received` is called while a read lasts, for each part of it that has come.
    """

    def __init__(self, *, is_tracing: bool, on_received: OnReceived | None = None) -> None:
        self.is_tracing = is_tracing
        self._on_received = on_received
        self._began = time.perf_counter()
        self._activities: list[Activity] = []

    @contextmanager
    def span(self, phase: Phase, *, num_bytes: int = 0, file: str = "") -> Iterator[None]:
        """Note that this thread is in `phase` as long as the context lasts."""
        if not self.is_tracing:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._activities.append(  # append is atomic: no lock
                Activity(
                    phase=phase,
                    thread=threading.current_thread().name,
                    start=start - self._began,
                    seconds=seconds,
                    num_bytes=num_bytes,
                    file=file,
                )
            )

    def received(self, num_bytes: int, *, file: str) -> None:
        """Report that bytes of a read have come."""
        if self._on_received is not None:
            self._on_received(num_bytes, file)

    @property
    def seconds(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._began

    def activities(self) -> tuple[Activity, ...]:
        """Return what was noted, in order of time."""
        return tuple(sorted(self._activities, key=lambda activity: activity.start))


NO_RECORDER = Recorder(is_tracing=False)
"""For what nobody traces; it keeps nothing, so all can share it."""
