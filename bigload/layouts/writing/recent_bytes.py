"""Memory of the bytes that a thread has last received of a remote file, for windows that share them.

Files for ranks take turns in the rows of a tensor that is divided by columns: what lies between the columns of one is
what the next one wants. A file without a name holds the bytes, so that the system scatters them as it does those of a
local file.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bigload.checkpoint.byte_source import ByteSource, expect_reads, fill
from bigload.checkpoint.sources.range_streams import MAX_GAP_BYTES
from bigload.machine.files.sparse_files import punch_hole
from bigload.units import MIB

RECENT_BYTES = 4 * MIB
"""Kept for each thread."""

_PIECE_BYTES = MIB


class RecentBytes:
    """The recently received bytes of each thread, of one source at a time."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._lock = threading.Lock()
        self._all: list[_ThreadCopy] = []

    def of_thread(self) -> _ThreadCopy:
        kept: _ThreadCopy | None = getattr(self._thread, "kept", None)
        if kept is None:
            kept = self._thread.kept = _ThreadCopy()
            with self._lock:
                self._all.append(kept)
        return kept

    def close(self) -> None:
        for kept in self._all:
            os.close(kept.descriptor)


@dataclass(slots=True)
class KeptExtents:
    """Extents of a file that are kept, as [start, stop] pairs; the last used one is last."""

    pairs: list[list[int]] = field(default_factory=list)

    def missing(self, start: int, stop: int) -> tuple[int, int]:
        """Return what has to be fetched so that `start` to `stop` are kept, and count it as kept."""
        found = next((pair for pair in self.pairs if pair[0] <= start <= pair[1] + MAX_GAP_BYTES), None)
        if found is None:
            found = [start, start]
        else:
            self.pairs.remove(found)
        begin, found[1] = found[1], max(found[1], stop)
        for pair in self.pairs:  # no byte is in two of them: one that is dropped would be missing in the other
            if pair[0] < found[0]:
                pair[1] = min(pair[1], found[0])
            else:
                pair[0] = max(pair[0], found[1])
        self.pairs = [*(pair for pair in self.pairs if pair[0] < pair[1]), found]
        return begin, found[1]

    def drop(self) -> list[tuple[int, int]]:
        """Return what is too much: it is no longer kept. The last used bytes stay."""
        excess = sum(stop - start for start, stop in self.pairs) - RECENT_BYTES - MAX_GAP_BYTES
        dropped = []
        while excess > 0:
            pair = self.pairs[0]
            count = min(excess, pair[1] - pair[0])
            dropped.append((pair[0], pair[0] + count))
            pair[0] += count
            excess -= count
            if pair[0] == pair[1]:
                del self.pairs[0]
        return dropped


class _ThreadCopy:
    """Bytes of `source` that are kept, at the same positions of a file in memory."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("bigload-recent")
        self.source: ByteSource | None = None
        self.extents = KeptExtents()
        self.piece = memoryview(bytearray(_PIECE_BYTES))


class RecentReader:
    """A `ByteSource` of the bytes of another, which reads none twice that are in `recent`."""

    def __init__(self, source: ByteSource, recent: RecentBytes) -> None:
        self._source = source
        self._recent = recent

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        kept, missing = self._recent.of_thread(), []
        extents = KeptExtents([list(pair) for pair in kept.extents.pairs] if kept.source is self._source else [])
        for start, stop in ranges:
            begin, end = extents.missing(start, stop)
            extents.drop()
            if begin < end:
                missing.append((begin, end))
        expect_reads(self._source, missing)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        kept = self._recent.of_thread()
        if kept.source is not self._source:
            os.ftruncate(kept.descriptor, 0)
            kept.source, kept.extents = self._source, KeptExtents()
        position, end = kept.extents.missing(offset, offset + sum(buffer.nbytes for buffer in buffers))
        while position < end:
            piece = kept.piece[: end - position]
            self._source.read_into([piece], position)
            os.pwrite(kept.descriptor, piece, position)
            position += len(piece)
        fill(buffers, kept.descriptor, offset, "bytes kept in memory")
        for start, stop in kept.extents.drop():
            punch_hole(kept.descriptor, start, stop)

    def close(self) -> None:
        """Do nothing: the other source has an owner."""
