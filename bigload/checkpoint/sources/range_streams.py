"""Open responses of a remote file, from which reads that follow each other are served without further requests.

A request costs two round trips where a service redirects, and services limit their rate. So a thread that says what it
is about to read (`expect`) gets one response for all of it. A response belongs to the thread that asked for it, and a
thread has only a few: connections are bounded by threads. Nothing is buffered but the last chunk of each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from bigload.machine.threads.thread_pool import abandonable
from bigload.units import KIB, MIB

MAX_STREAM_BYTES = 256 * MIB
"""More is asked for in several requests: a response that lasts for minutes is more likely to be cut off."""

LEAST_STREAM_BYTES = 8 * MIB
"""Less is not worth two round trips."""

MAX_GAP_BYTES = 256 * KIB
"""Bytes that are read over instead of sending another request, which costs two round trips."""

MAX_STREAMS = 4
"""Open responses of one thread in one file: pieces of a tensor may take turns."""

MAX_STREAMS_OF_THREAD = 6
"""The same over all files: 16 threads stay below the 100 connections that huggingface_hub's client opens at most."""

OpenRange = Callable[[int, int], AbstractContextManager[Iterator[bytes]]]
"""Asks for bytes `start` to `stop` of a file, and gives the chunks of the answer as they arrive."""

_thread = threading.local()  # `streams`: open responses of the thread, the last used one last


class Shares:
    """Sizes of the shares of `total` bytes that threads ask for: smaller towards the end, so that all end together."""

    def __init__(self, total: int, *, threads: int, most: int = MAX_STREAM_BYTES) -> None:
        self._left = total
        self._threads = threads
        self._bounds = min(LEAST_STREAM_BYTES, total // (4 * threads)), most

    @property
    def next_bytes(self) -> int:
        """The next share: half of what is left for each thread."""
        least, most = self._bounds
        return min(max(self._left // (2 * self._threads), least), most)

    def take(self, num_bytes: int) -> None:
        self._left -= num_bytes


class RangeStreams:
    """The open responses of one file. Threads share it; each has responses of its own."""

    def __init__(self, open_range: OpenRange) -> None:
        self._open_range = open_range
        self._expected = threading.local()
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take the ranges that the calling thread is about to read, in this order, in place of those before."""
        asked: list[tuple[int, int]] = []
        current: list[int] = []  # those of `asked` that are still read from, the last used one last
        for start, stop in ranges:
            index = next((each for each in reversed(current) if 0 <= start - asked[each][1] <= MAX_GAP_BYTES), None)
            if index is None:
                current = [*current[1 - MAX_STREAMS :], len(asked)]
                asked.append((start, stop))
            else:
                current.remove(index)
                current.append(index)
                asked[index] = asked[index][0], stop
        self._expected.ranges = asked

    def at(self, offset: int, stop: int) -> Stream:
        """Return a response whose next byte is `offset`: an open one, or else a new one up to `stop` or further."""
        mine: list[Stream] = _thread.__dict__.setdefault("streams", [])
        mine[:] = [stream for stream in mine if stream.is_open]
        for stream in mine:
            if stream.owner is self and 0 <= offset - stream.position <= MAX_GAP_BYTES and offset < stream.stop:
                mine.remove(stream)
                mine.append(stream)
                stream.skip_to(offset)
                return stream
        here = [stream for stream in mine if stream.owner is self]
        if len(here) >= MAX_STREAMS or len(mine) >= MAX_STREAMS_OF_THREAD:
            oldest = (here if len(here) >= MAX_STREAMS else mine)[0]
            mine.remove(oldest)
            oldest.close()
        # Where one range runs over another, such as numbers over their scales, the shorter one is what is read here.
        ends = [end for begin, end in getattr(self._expected, "ranges", ()) if begin <= offset < end]
        if ends:
            stop = max(stop, min(*ends, offset + MAX_STREAM_BYTES))
        stream = Stream(self, offset, stop, self._open_range)
        mine.append(stream)
        with self._lock:
            self._streams = {other for other in self._streams if other.is_open} | {stream}
        return stream

    def close(self) -> None:
        """End all responses but those in which a thread still waits: it was given up, and closes its own."""
        with self._lock:
            for stream in self._streams:
                if not stream.is_busy:
                    stream.close()


class Stream:
    """A response; `position` is the offset of the next byte. It closes after its last byte and after an error."""

    def __init__(self, owner: object, start: int, stop: int, open_range: OpenRange) -> None:
        self.owner = owner
        self.position = start
        self.stop = stop
        self.is_busy = False
        self.is_open = True
        self._rest = memoryview(b"")
        self._response = ExitStack()
        with self._waiting():
            self._chunks = self._response.enter_context(open_range(start, stop))

    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes, `num_bytes` at most; none if the response ended early."""
        if not self._rest:
            self._rest = self._next_chunk()
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        self.position += len(taken)
        if not taken:
            self.close()
        elif self.position == self.stop:
            self._next_chunk()  # the end: the connection can be used again
            self.close()
        return taken

    def skip_to(self, offset: int) -> None:
        while self.position < offset and self.take(offset - self.position):
            pass

    def close(self) -> None:
        """Drop the response. Safe to repeat."""
        self.is_open = False
        self._response.close()

    def _next_chunk(self) -> memoryview:
        with self._waiting():
            return memoryview(next(self._chunks, b""))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.is_busy = True
        try:
            with abandonable():
                yield
        except BaseException as error:
            self.is_open = False
            self._response.__exit__(type(error), error, error.__traceback__)  # raises it in the words of the source
            raise
        finally:
            self.is_busy = False
