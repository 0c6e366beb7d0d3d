"""Reads past the page cache (O_DIRECT): the disk writes into memory of this process, and nothing is kept of it.

Disk and memory have to meet at multiples of a block (512 bytes to 4 KiB). Tensors rarely begin at one, so the blocks
around the wanted bytes are read into memory that is lent for it, and the bytes are copied from there; the middle of a
buffer that happens to lie right is read in place.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from bigload.checkpoint.byte_source import OpenFile, PositionalReader, ended_early, read_once, unfilled
from bigload.descriptors import MAX_BUFFERS
from bigload.errors import ReadError, UnsupportedMethodError
from bigload.loading.readers.mapped import MappedFile, release_pages
from bigload.machine.files.page_cache import cached_bytes, cached_pages, pages_between
from bigload.machine.libc import libc as _libc
from bigload.machine.memory.huge_pages import address_of
from bigload.machine.threads.activities import NO_RECORDER, Phase, Recorder
from bigload.machine.threads.inflight_pool import BlockPool
from bigload.units import KIB, MIB

_MIN_IN_PLACE_BYTES = MIB  # less than this is read together with its neighbours: a read is a trip to the disk
_SAMPLE_BYTES = 64 * KIB
MAX_ALIGNMENT = 64 * KIB
_OWN_BLOCKS = 4  # of a reader that was given no pool
_AT_FDCWD, _STATX_DIOALIGN = -100, 0x2000


class _Statx(ctypes.Structure):
    """The parts of `struct statx` that matter here (linux/stat.h; the two figures came with Linux 6.1)."""

    _fields_ = (
        ("stx_mask", ctypes.c_uint32),
        ("before", ctypes.c_byte * 148),
        ("stx_dio_mem_align", ctypes.c_uint32),
        ("stx_dio_offset_align", ctypes.c_uint32),
        ("after", ctypes.c_byte * 96),
    )


def direct_alignment(path: Path) -> int | None:
    """Return of what number of bytes addresses, offsets and lengths of direct reads of `path` have to be multiples.

    `None` if its file system offers none. Asked of the system (statx(2)) where it can say, and tried out elsewhere.
    """
    with OpenFile(path):
        if not hasattr(os, "O_DIRECT"):  # macOS, Windows
            return None
        told = _told_alignment(path)
        alignment = _tried_alignment(path) if told is None else told
    return alignment if 0 < alignment <= MAX_ALIGNMENT else None


class DirectReader(OpenFile):
    """Reads any bytes of a file by direct reads of the blocks around them.

    The memory for those blocks is borrowed from `pool`: share one among the files of a load, and with as many blocks as
    there are threads none of them waits. `recorder` is told of reads and copies.
    """

    def __init__(self, path: Path, *, pool: BlockPool | None = None, recorder: Recorder = NO_RECORDER) -> None:
        alignment = direct_alignment(path)
        if alignment is None:
            raise UnsupportedMethodError(path, "direct", "its file system offers no reads past the page cache")
        super().__init__(path, flags=os.O_DIRECT, recorder=recorder)
        self._alignment = alignment
        self._pool = BlockPool(_OWN_BLOCKS) if pool is None else pool

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`; see `ByteSource`.

        As a rule by one read: a disk takes as long for the few bytes before those that are read in place, or behind
        them, as for all that it was asked for before.
        """
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        for batch in self._batches(buffers, offset):
            self._read_batch(batch, stop)

    @contextmanager
    def viewed(self, start: int, stop: int) -> Iterator[memoryview]:
        """Lend bytes `start` to `stop`, or as many of them as a block of the pool has room for."""
        begin = self._down(start)
        with self._pool.lend() as block, memoryview(block) as view:
            stop = min(stop, begin + self._down(len(view)))
            self._read([view[: self._up(stop) - begin]], start, stop, wanted=stop)
            yield view[start - begin : stop - begin]

    def _batches(self, buffers: Sequence[memoryview], offset: int) -> Iterator[list[_ReadPart]]:
        """Yield what belongs into `buffers` as the parts that a read brings: a block has room for those it copies."""
        batch: list[_ReadPart] = []
        room = self._down(self._pool.block_bytes)
        for run, is_in_place in self._runs(buffers, offset):
            start, stop = run[0].start, run[-1].stop
            while start < stop:
                end = stop if is_in_place else min(stop, self._down(start) + room)
                batch.append(_ReadPart(run, start, end, is_in_place))
                room -= 0 if is_in_place else self._up(end) - self._down(start)
                start = end
                if not room or len(batch) == MAX_BUFFERS:
                    yield batch
                    batch, room = [], self._down(self._pool.block_bytes)
        if batch:
            yield batch

    def _runs(self, buffers: Sequence[memoryview], offset: int) -> Iterator[tuple[list[_Target], bool]]:
        """Yield what is copied, as far as it goes together, and each part that is read in place; and which it is."""
        copied: list[_Target] = []
        for piece in _targets(buffers, offset):
            begin, end = self._up(piece.start), self._down(piece.stop)
            if (piece.address - piece.start) % self._alignment or end - begin < _MIN_IN_PLACE_BYTES:
                copied.append(piece)
                continue
            copied += [piece.part(piece.start, begin)] * (begin > piece.start)
            if copied:
                yield copied, False
            yield [piece.part(begin, end)], True
            copied = [piece.part(end, piece.stop)] * (end < piece.stop)
        if copied:
            yield copied, False

    def _read_batch(self, batch: Sequence[_ReadPart], wanted: int) -> None:
        """Fill the parts of `batch`; `wanted` is where the whole request ends, which is what an error is about."""
        with ExitStack() as lent:
            views: list[memoryview] = []
            copies: list[tuple[_ReadPart, int]] = []
            block, used = None, 0
            for part in batch:
                if part.is_in_place:
                    views.append(part.targets[0].view)
                    continue
                block = block or lent.enter_context(self._pool.lend())
                begin, end = self._down(part.start), self._up(part.stop)
                views.append(memoryview(block)[used : used + end - begin])
                copies.append((part, address_of(block) + used - begin))
                used += end - begin
            self._read(views, batch[0].start, batch[-1].stop, wanted=wanted)
            for part, origin in copies:
                with self._recorder.span(Phase.COPY, num_bytes=part.stop - part.start, file=self.path.name):
                    _copy(origin, part.targets, part.start, part.stop)

    def _read(self, views: Sequence[memoryview], start: int, stop: int, *, wanted: int) -> None:
        """Fill `views` with the blocks of the disk from `start` to `stop`: only the end of a file is uneven."""
        pending, position = list(views), self._down(start)
        while position < stop:
            num_bytes = sum(view.nbytes for view in pending)
            with self._recorder.span(Phase.READ, num_bytes=num_bytes, file=self.path.name):
                count = read_once(pending, self.descriptor, position, self.path)
            position += count
            if position < stop and (count == 0 or count % self._alignment):
                end = max(position, start)
                raise ended_early(self.path, end, missing=wanted - end)
            pending = unfilled(pending, count)

    def _down(self, position: int) -> int:
        return position // self._alignment * self._alignment

    def _up(self, position: int) -> int:
        return -(-position // self._alignment) * self._alignment


class CacheFirstReader:
    """Read through the page cache a range that is at least half cached, and past it any other.

    Before Linux 6.5 an eighth of a range from 1 MiB on is looked up: all of it would take 15 to 50 ms per GiB, as much
    as a tenth of a copy from the cache. Arguments and errors are those of `DirectReader`; what is read past the cache
    is read in `waiting()`.
    """

    def __init__(
        self,
        path: Path,
        *,
        pool: BlockPool | None = None,
        recorder: Recorder = NO_RECORDER,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._path = path
        self._waiting = waiting
        with ExitStack() as opened:
            self._past = DirectReader(path, pool=pool, recorder=recorder)
            opened.callback(self._past.close)
            self._through = PositionalReader(path, recorder=recorder)
            opened.callback(self._through.close)
            self._opened = opened.pop_all()
        self._lock = Lock()
        self._map: MappedFile | None = None

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`; see `ByteSource`."""
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        pages = cached_pages(self._through.descriptor, offset, stop)
        if self._is_cached(offset, stop, pages):
            self._through.read_into(buffers, offset)
            return
        with self._waiting():
            self._past.read_into(buffers, offset)

    @contextmanager
    def viewed(self, start: int, stop: int) -> Iterator[memoryview]:
        """Lend bytes `start` to `stop`, not to be written to: in the page cache itself, or as a `DirectReader` does.

        Raises ReadError if the file has not all of them. One that is cut short while they are lent ends the process.

        Where all of them are cached, whoever reads them enters them into the page table: one fault enters 16 pages, and
        populating beforehand, which visits each page, takes half as long as comparing does.
        """
        pages = cached_pages(self._through.descriptor, start, stop)
        if not self._is_cached(start, stop, pages):
            with self._past.viewed(start, stop) as view:
                yield view
            return
        with self._lock:
            self._map = self._map or self._opened.enter_context(closing(MappedFile(self._path)))
        mapped = len(self._map.buffer)
        if mapped < stop:
            raise ended_early(self._path, mapped, missing=stop - mapped)
        if pages is not None and pages >= pages_between(start, stop):
            self._map.check_size(stop)
        else:
            self._map.populate(start, stop)  # what a fault has to read, and cannot, would end the process
        try:
            yield self._map.buffer[start:stop]
        finally:
            release_pages(self._map.buffer, start, stop)

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _is_cached(self, start: int, stop: int, pages: int | None) -> bool:
        """Return whether at least half is, of which `cached_pages` has said `pages`."""
        if pages is not None:
            return 2 * pages * mmap.PAGESIZE >= stop - start
        asked = [(start, stop)]
        if stop - start >= MIB:
            asked = [(at, min(at + _SAMPLE_BYTES, stop)) for at in range(start, stop, 8 * _SAMPLE_BYTES)]
        try:
            cached = cached_bytes(self._path, asked) or 0
        except OSError:  # by now there may be nothing at that path; what is open can be read all the same
            cached = 0
        return 2 * cached >= sum(end - begin for begin, end in asked)


class _Target(NamedTuple):
    """Bytes `start` to `stop` of the file, and the memory they belong into."""

    view: memoryview
    address: int
    start: int

    @property
    def num_bytes(self) -> int:
        return self.view.nbytes

    @property
    def stop(self) -> int:
        return self.start + self.view.nbytes

    def part(self, start: int, stop: int) -> _Target:
        skipped = start - self.start
        return _Target(self.view[skipped : stop - self.start], self.address + skipped, start)


class _ReadPart(NamedTuple):
    """Bytes `start` to `stop` of the file, for `targets`, or a part of them: read in place, or copied from a block."""

    targets: Sequence[_Target]
    start: int
    stop: int
    is_in_place: bool


def _targets(buffers: Sequence[memoryview], offset: int) -> Iterator[_Target]:
    for buffer in buffers:
        if buffer.nbytes:
            yield _Target(buffer, address_of(buffer), offset)
            offset += buffer.nbytes


def _copy(origin: int, run: Sequence[_Target], start: int, stop: int) -> None:
    """Copy bytes `start` to `stop` of the file into `run`; byte 0 of the file would lie at the address `origin`.

    By memmove, which lets other threads of Python run meanwhile; an assignment to a view does not.
    """
    for piece in run:
        begin, end = max(piece.start, start), min(piece.stop, stop)
        if begin < end:
            ctypes.memmove(piece.address + begin - piece.start, origin + begin, end - begin)


def _told_alignment(path: Path) -> int | None:
    """Return what the system says: 0 where there are no direct reads, `None` where it cannot say."""
    statx = getattr(_libc, "statx", None)
    found = _Statx()
    if statx is None or statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_DIOALIGN, ctypes.byref(found)):
        return None
    if not found.stx_mask & _STATX_DIOALIGN:
        return None
    return int(max(found.stx_dio_mem_align, found.stx_dio_offset_align))


def _tried_alignment(path: Path) -> int:
    """Return the size of a page, which suits every disk, if a page can be read directly, and otherwise 0."""
    try:
        with (
            OpenFile(path, flags=os.O_DIRECT) as opened,
            mmap.mmap(-1, mmap.PAGESIZE) as page,
            memoryview(page) as view,
        ):
            read_once([view], opened.descriptor, 0, path)
    except ReadError:
        return 0
    return mmap.PAGESIZE
