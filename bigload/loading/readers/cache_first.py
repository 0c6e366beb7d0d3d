"""Reader for files that are cached in part: cached ranges come from the page cache, the rest from the disk."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bigload.checkpoint.byte_source import PositionalReader
from bigload.loading.readers.direct import DirectReader
from bigload.machine.activities import NO_RECORDER, Recorder
from bigload.machine.inflight_pool import BlockPool
from bigload.machine.page_cache import cached_bytes


class CacheFirstReader:
    """Read through the page cache a range that is at least half cached, and past it any other.

    The lookup takes 0.2 to 0.3 ms for 16 MiB, a thirtieth of what a disk of 2 GB/s takes to read them. Arguments and
    errors are those of `DirectReader`.
    """

    def __init__(self, path: Path, *, pool: BlockPool | None = None, recorder: Recorder = NO_RECORDER) -> None:
        self._path = path
        with ExitStack() as opened:
            self._past = DirectReader(path, pool=pool, recorder=recorder)
            opened.callback(self._past.close)
            self._through = PositionalReader(path, recorder=recorder)
            opened.callback(self._through.close)
            self._opened = opened.pop_all()

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`; see `ByteSource`."""
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        source = self._through if 2 * self._cached(offset, stop) >= stop - offset else self._past
        source.read_into(buffers, offset)

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _cached(self, start: int, stop: int) -> int:
        try:
            return cached_bytes(self._path, [(start, stop)]) or 0
        except OSError:  # by now there may be nothing at that path; what is open can be read all the same
            return 0
