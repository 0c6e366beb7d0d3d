"""Reads past the page cache (O_DIRECT): the disk writes into memory of this process, and nothing is kept of it.

Disk and memory have to meet at multiples of a block (512 bytes to 4 KiB). Tensors rarely begin at one, so the blocks
around the wanted bytes are read into memory that is lent for it, and the bytes are copied from there; the middle of a
buffer that happens to lie right is read in place.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from bigload.checkpoint.byte_source import OpenFile, PositionalReader, ended_early, read_once
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
        """Fill all of `buffers`; see `ByteSource`."""
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        run: list[_Target] = []
        for piece in _targets(buffers, offset):
            head, body, tail = self._split(piece)
            run.append(head)
            if body.num_bytes:
                self._read_copying(run, stop)
                self._read_in_place(body, stop)
                run = [tail]
        self._read_copying(run, stop)

    @contextmanager
    def viewed(self, start: int, stop: int) -> Iterator[memoryview]:
        """Lend bytes `start` to `stop`, or as many of them as a block of the pool has room for."""
        begin = position = self._down(start)
        with self._pool.lend() as block, memoryview(block) as view:
            stop = min(stop, begin + self._down(len(view)))
            while position < stop:
                count = self._read(view[position - begin : self._up(stop) - begin], position)
                position += count
                if position < stop and (count == 0 or count % self._alignment):
                    raise ended_early(self.path, position, missing=stop - position)
            yield view[start - begin : stop - begin]

    def _split(self, piece: _Target) -> tuple[_Target, _Target, _Target]:
        """Return the beginning, the part that can be read in place, and the rest; each may be empty."""
        begin, end = self._up(piece.start), self._down(piece.stop)
        if (piece.address - piece.start) % self._alignment or end - begin < _MIN_IN_PLACE_BYTES:
            begin = end = piece.stop
        return piece.part(piece.start, begin), piece.part(begin, end), piece.part(end, piece.stop)

    def _read_in_place(self, piece: _Target, wanted: int) -> None:
        """Fill `piece`; `wanted` is where the whole request ends, which is what an error is about."""
        position = piece.start
        while position < piece.stop:
            count = self._read(piece.part(position, piece.stop).view, position)
            position += count
            if position < piece.stop and (count == 0 or count % self._alignment):  # only the end of a file is uneven
                raise ended_early(self.path, position, missing=wanted - position)

    def _read_copying(self, run: Sequence[_Target], wanted: int) -> None:
        """Fill `run`, pieces that follow each other, by way of a lent block."""
        run = [piece for piece in run if piece.num_bytes]
        if not run:
            return
        position, stop = run[0].start, run[-1].stop
        with self._pool.lend() as block, memoryview(block) as view:
            while position < stop:
                begin = self._down(position)
                end = begin + self._read(view[: self._up(stop) - begin], begin)
                if end <= position:
                    raise ended_early(self.path, position, missing=wanted - position)
                end = min(end, stop)
                with self._recorder.span(Phase.COPY, num_bytes=end - position, file=self.path.name):
                    _copy(address_of(block) - begin, run, position, end)
                position = end

    def _read(self, view: memoryview, offset: int) -> int:
        with self._recorder.span(Phase.READ, num_bytes=view.nbytes, file=self.path.name):
            return read_once([view], self.descriptor, offset, self.path)

    def _down(self, position: int) -> int:
        return position // self._alignment * self._alignment

    def _up(self, position: int) -> int:
        return -(-position // self._alignment) * self._alignment


class CacheFirstReader:
    """Read through the page cache a range that is at least half cached, and past it any other.

    Before Linux 6.5 an eighth of a range from 1 MiB on is looked up: all of it would take 15 to 50 ms per GiB, as much
    as a tenth of a copy from the cache. Arguments and errors are those of `DirectReader`.
    """

    def __init__(self, path: Path, *, pool: BlockPool | None = None, recorder: Recorder = NO_RECORDER) -> None:
        self._path = path
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
        source = self._through if self._is_cached(offset, stop, pages) else self._past
        source.read_into(buffers, offset)

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
