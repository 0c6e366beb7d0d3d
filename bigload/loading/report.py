"""Report of a load: method and reason, bytes, seconds, and the phases of each thread when it is traced."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from bigload.loading.methods import Method


class Phase(StrEnum):
    """What a thread does at a moment of a load; the parts of it that are none of these are waiting.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One stretch of one thread: `start` and `seconds` count from the beginning of the load."""

    phase: Phase
    thread: str
    start: float
    seconds: float
    num_bytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Result of a load, without its tensors.

    Attributes:
        method: The one that was used; never `auto`.
        reason: Why that one, as half a sentence.
        threads: Threads that read.
        max_inflight_bytes: The bound on bytes that were being read or staged at one moment.
        read_bytes: Bytes that were asked of the files.
        tensor_bytes: Bytes of the tensors that came out.
        seconds: From the first check to the last assignment.
        activities: What each thread did and when; empty unless the load was traced.
        left_on_disk: Tensors that the plan keeps on disk: they were not read.
    """

    method: Method
    reason: str
    threads: int
    max_inflight_bytes: int
    read_bytes: int
    tensor_bytes: int
    seconds: float
    activities: tuple[Activity, ...] = ()
    left_on_disk: tuple[str, ...] = ()

    @property
    def phase_seconds(self) -> dict[Phase, float]:
        """Return the seconds of each phase, all threads together; empty unless the load was traced."""
        seconds: dict[Phase, float] = {}
        for activity in self.activities:
            seconds[activity.phase] = seconds.get(activity.phase, 0.0) + activity.seconds
        return seconds


class Recorder:
    """Keeps the activities of a load that is traced; does nothing, and costs next to nothing, for one that is not.

    A traced load faults memory in before it reads into it, which separates faults from reads; otherwise the reads
    fault it in, which is faster.
    """

    def __init__(self, *, is_tracing: bool) -> None:
        self.is_tracing = is_tracing
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

    @property
    def seconds(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self._began

    def activities(self) -> tuple[Activity, ...]:
        """Return what was noted, in order of time."""
        return tuple(sorted(self._activities, key=lambda activity: activity.start))
