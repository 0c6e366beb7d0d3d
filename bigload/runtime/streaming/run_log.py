"""Log of streaming: statistics of each forward of the model, and a trace."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_FORWARDS_KEPT = 1000
_SPANS_KEPT = 20_000


class ForwardStats(NamedTuple):
    """Events of one forward of the model, and of the time since the one before.

    Attributes:
        seconds: From its beginning to its end.
        bytes_from_disk: What this process has had read from disks; `None` where the system does not count that.
        bytes_from_ram: Weights that were loaded, and not from a disk: out of the page cache or the process's memory.
        wait_seconds: How long it waited for weights.
        fetch_seconds: How long weights were being loaded.
        peak_bytes: The most of weights that were there or on their way at one moment.
    """

    seconds: float
    bytes_from_disk: int | None
    bytes_from_ram: int
    wait_seconds: float
    fetch_seconds: float
    peak_bytes: int

    @property
    def overlap(self) -> float | None:
        """The part of fetching, 0 to 1, during which no forward waited; `None` if nothing was fetched."""
        return max(0.0, 1 - self.wait_seconds / self.fetch_seconds) if self.fetch_seconds else None


class TraceSpan(NamedTuple):
    """A span of time in the trace: a block that computes or waits, or is loaded.

    Attributes:
        kind: `compute`, `wait` or `fetch`.
        name: The block.
        thread: The thread.
        start: Seconds since the model was dispatched.
        seconds: How long.
        num_bytes: Bytes loaded.
    """

    kind: str
    name: str
    thread: str
    start: float
    seconds: float
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStats:
    """Totals of a dispatched model since it was dispatched.

    Attributes:
        forwards: The last thousand forwards, oldest first.
        num_forwards: How many there have been.
        spans: The last twenty thousand stretches of time, by their beginning.
        experts: How often routed experts were used, in their order, by the name of the module that holds them: tokens,
            or forwards where each is a module of its own.
        whole_experts: Modules whose experts were to come on demand and are all loaded with the module, because its
            computation cannot be replaced: loops of their own (llama4, dbrx), or an implementation that a user chose.
    """

    forwards: tuple[ForwardStats, ...]
    num_forwards: int
    spans: tuple[TraceSpan, ...]
    experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole_experts: tuple[str, ...] = ()


_Note = tuple[str, str, threading.Thread, float, float, int]
"""Kind, block, thread, beginning, end, bytes."""


@dataclass(slots=True)
class _Counts:
    """Counts since the last forward ended."""

    read_before: int | None
    fetched_bytes: int = 0
    wait_seconds: float = 0.0
    fetch_seconds: float = 0.0
    peak_bytes: int = 0


class RunLog:
    """Log of one model. May be used from several threads."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._lock = threading.Lock()
        self._forwards: deque[ForwardStats] = deque(maxlen=_FORWARDS_KEPT)
        self._notes: deque[_Note] = deque(maxlen=_SPANS_KEPT)  # spans are made of them only when asked for
        self._num_forwards = 0
        self._here = threading.local()
        self._now = _Counts(_bytes_read())

    def begin_in_fork(self) -> None:
        """Be of use in a process that was forked off, where another thread's lock would never be given back."""
        self._lock = threading.Lock()

    def stats(self) -> RunStats:
        with self._lock:
            notes, forwards, num_forwards = list(self._notes), tuple(self._forwards), self._num_forwards
        spans = [
            TraceSpan(
                kind=kind,
                name=name,
                thread=thread.name,
                start=start - self._began,
                seconds=stop - start,
                num_bytes=num_bytes,
            )
            for kind, name, thread, start, stop, num_bytes in notes
        ]
        return RunStats(
            forwards=forwards, num_forwards=num_forwards, spans=tuple(sorted(spans, key=lambda span: span.start))
        )

    def forward_began(self, *, held_bytes: int = 0) -> None:
        """Note that the calling thread begins a forward of the whole model."""
        with self._lock:
            self._now.peak_bytes = max(self._now.peak_bytes, held_bytes)
        self._stack("forwards").append(time.perf_counter())

    def forward_ended(self) -> None:
        """Note that it ended, or was broken off."""
        begins = self._stack("forwards")
        if not begins:
            return
        seconds = time.perf_counter() - begins.pop()
        with self._lock:
            counts, self._now = self._now, _Counts(_bytes_read())
            before, now = counts.read_before, self._now.read_before
            disk = None if before is None or now is None else now - before
            stats = ForwardStats(
                seconds=seconds,
                bytes_from_disk=disk,
                bytes_from_ram=max(counts.fetched_bytes - (disk or 0), 0),
                wait_seconds=counts.wait_seconds,
                fetch_seconds=counts.fetch_seconds,
                peak_bytes=counts.peak_bytes,
            )
            self._forwards.append(stats)
            self._num_forwards += 1

    def entered(self, name: str, began: float, *, held_bytes: int) -> None:
        """Note that the calling thread has the weights of block `name`, having asked for them when it `began`."""
        now = time.perf_counter()
        with self._lock:
            self._now.wait_seconds += now - began
            self._now.peak_bytes = max(self._now.peak_bytes, held_bytes)
            self._note("wait", name, began, now)
        self._stack("blocks").append(now)

    def left(self, name: str) -> None:
        """Note that it is done with them."""
        begins = self._stack("blocks")
        if begins:
            with self._lock:
                self._note("compute", name, begins.pop(), time.perf_counter())

    @contextmanager
    def fetching(self, name: str, num_bytes: int) -> Iterator[None]:
        """Note that the calling thread loads the weights of block `name` while the context lasts."""
        began = time.perf_counter()
        try:
            yield
        finally:
            now = time.perf_counter()
            with self._lock:
                counts = self._now
                counts.fetched_bytes += num_bytes
                counts.fetch_seconds += now - began
                self._note("fetch", name, began, now, num_bytes)

    def _note(self, kind: str, name: str, start: float, stop: float, num_bytes: int = 0) -> None:
        self._notes.append((kind, name, threading.current_thread(), start, stop, num_bytes))

    def _stack(self, name: str) -> list[float]:
        stack: list[float] = self._here.__dict__.setdefault(name, [])
        return stack


def _bytes_read() -> int | None:
    """Return what this process has had read from disks so far, by page faults too (proc(5), /proc/pid/io)."""
    try:
        text = Path("/proc/self/io").read_text("utf-8")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes:")), None)
