"""Memory maps of files: their page-cache pages in this process, read when they are first touched.

The maps are private and writable: a write to a tensor copies that page, and the file never changes.
A page that was not written to is the file's own, so a file that another process cuts short or overwrites in place
changes under the tensors; touching what is no longer there ends the process with SIGBUS. `populate` finds out in time
what is missing by then; a later change can be avoided only by not using maps.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from bigload.checkpoint.byte_source import OpenFile, ended_early, fill
from bigload.errors import ReadError
from bigload.machine.libc import MAP_FAILED
from bigload.machine.libc import libc as _libc
from bigload.machine.memory.huge_pages import address_of, no_memory
from bigload.machine.threads.activities import NO_RECORDER, Phase, Recorder
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import GIB, MIB

_MADV_POPULATE_READ = 22
_MAP_NORESERVE = 0x4000
_STEP_BYTES = 8 * MIB
_DISK_BYTES_PER_SECOND = 8 * GIB
"""Pages that come slower than this are not only entered into a table: they are read."""
_DISK_THREADS = 2
"""Threads that read pages at a time: two keep a disk busy, more slow down threads that compute."""
_PAGES_PER_TOUCH = 512  # bytes in a pipe: fewer than it holds (65536, or 4096 for a user with very many)


class MappedFile(OpenFile):
    """The first `num_bytes` of a file (all of it when left out) as memory.

    `buffer` is what tensors are made of. The map lives as long as it, or anything made of it, does; `close()` ends what
    this class can do, not the map. Python's own `mmap` would keep a descriptor open for as long, one per file.
    """

    def __init__(self, path: Path, num_bytes: int | None = None, *, recorder: Recorder = NO_RECORDER) -> None:
        super().__init__(path, recorder=recorder)
        try:
            size = os.fstat(self.descriptor).st_size
            self._num_bytes = size if num_bytes is None else num_bytes
            self.check_size(self._num_bytes)
            self._buffer: memoryview | None = memoryview(self._map()).cast("B") if self._num_bytes else _NO_BYTES
        except BaseException:
            self.close()
            raise

    @property
    def buffer(self) -> memoryview:
        """The bytes of the file, writable; pages are read when they are touched, or by `populate` before."""
        if self._buffer is None:
            raise ValueError(f"{self.path} is closed")
        return self._buffer

    def populate(self, start: int, stop: int) -> None:
        """Bring bytes `start` to `stop` into the page cache and into this process's page table.

        May be called from several threads; the other threads of Python run on. What was written to the map stays.
        """
        begin, stop = start // mmap.PAGESIZE * mmap.PAGESIZE, min(stop, self._num_bytes)
        if start >= stop:
            return
        with self._recorder.span(Phase.FAULT, num_bytes=stop - start, file=self.path.name):
            reason = populate_pages(self.buffer, begin, stop)
        self.check_size(stop)  # also without an error: a file cut short within a page reads as zeros up to its end
        if reason == errno.ENOMEM:
            raise no_memory(f"the map of {self.path}", stop - start)
        if reason:
            raise ReadError(self.path, f"the disk did not give all of bytes {start} to {stop} ({os.strerror(reason)})")

    def check_size(self, stop: int) -> None:
        """Raise ReadError if the file now ends before byte `stop`."""
        try:
            size = (self.path.stat() if self.descriptor < 0 else os.fstat(self.descriptor)).st_size
        except OSError as error:
            raise ReadError(self.path, error) from error
        if size < stop:
            raise ended_early(self.path, size, missing=stop - size)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`; see `ByteSource`.

        Not out of the map but by reads: that copies once as well, and leaves no pages that count as this process's.
        """
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        with self._recorder.span(Phase.READ, num_bytes=num_bytes, file=self.path.name):
            if self.descriptor < 0:
                with OpenFile(self.path) as reopened:
                    fill(buffers, reopened.descriptor, offset, self.path)
            else:
                fill(buffers, self.descriptor, offset, self.path)

    def close_descriptor(self) -> None:
        """Close the file and keep the map; what reads it afterwards opens it by its name."""
        super().close()

    def close(self) -> None:
        """Close the file and drop the map, which lives as long as a view of `buffer`."""
        self._buffer = None
        super().close()

    def _map(self) -> ctypes.Array[ctypes.c_char]:
        # Without the reservation that a writable private map otherwise gets, a file may be larger than the memory.
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        address = _libc.mmap(None, self._num_bytes, protection, flags, self.descriptor, 0)
        if address == MAP_FAILED:
            reason = ctypes.get_errno()
            if reason == errno.ENOMEM:
                raise no_memory(f"the map of {self.path}", self._num_bytes)
            raise ReadError(self.path, f"it cannot be mapped ({os.strerror(reason)})")
        array = (ctypes.c_char * self._num_bytes).from_address(address)
        # Not at exit: whoever still uses a tensor then is better off with the map, and the system takes it anyway.
        weakref.finalize(array, _libc.munmap, address, self._num_bytes).atexit = False
        return array


def populate_pages(buffer: memoryview, start: int, stop: int) -> int:
    """Bring bytes `start`, where a page begins, to `stop` of the map `buffer` into this process's page table.

    Returns 0, or the number of the system's error for what is not to be had.
    """
    reason = 0
    if _libc.madvise(address_of(buffer) + start, stop - start, _MADV_POPULATE_READ):
        reason = ctypes.get_errno()
    if reason == errno.EINVAL:  # before Linux 5.14
        reason = _touch(buffer[start:stop])
    return reason


def advise_huge_pages(buffer: memoryview) -> None:
    """Ask that the map `buffer` of a file be read and shown in huge pages, where the system has them for files.

    What is read through the map from then on is cached in pieces of 2 MiB. These come from a disk with fewer requests,
    enter the page table in a hundredth of the time, and cost a processor fewer misses when it computes with them.
    """
    if buffer:
        _libc.madvise(address_of(buffer), len(buffer), mmap.MADV_HUGEPAGE)


def populate_pages_in_parallel(buffer: memoryview, start: int, stop: int) -> int:
    """Populate as `populate_pages` does, on more threads as soon as pages come at the speed of a disk."""
    first = min(start + _STEP_BYTES, stop)
    began = time.perf_counter()
    reason = populate_pages(buffer, start, first)
    if reason or first == stop:
        return reason
    if (first - start) / (time.perf_counter() - began) >= _DISK_BYTES_PER_SECOND:
        return populate_pages(buffer, first, stop)
    steps = [(begin, min(begin + _STEP_BYTES, stop)) for begin in range(first, stop, _STEP_BYTES)]
    reasons: list[int] = []
    run_jobs(lambda step: reasons.append(populate_pages(buffer, *step)), steps, threads=_DISK_THREADS)
    return next(filter(None, reasons), 0)


def release_pages(buffer: memoryview, start: int, stop: int, *, page_bytes: int = mmap.PAGESIZE) -> None:
    """Take the pages that lie between bytes `start` and `stop` of the map `buffer` out of this process's page table.

    They come back from the page cache when they are touched, as they are in the file: what was written to them is lost.
    A huge page of which only a part lies there is split, and comes back in 512 entries instead of one, also for those
    who use the rest of it: with the `page_bytes` of huge pages, these are left.
    """
    address = address_of(buffer)
    begin, end = -(-(address + start) // page_bytes) * page_bytes, (address + stop) // page_bytes * page_bytes
    if begin < end:
        _libc.madvise(begin, end - begin, mmap.MADV_DONTNEED)


_NO_BYTES = memoryview(bytearray())


def _touch(view: memoryview) -> int:
    """Touch every page of `view`, which starts at one; return 0, or the error number of a page that is not to be had.

    The kernel does it, writing a byte of each into a pipe: where a touch of our own would end the process, it gets an
    error back.
    """
    step = _PAGES_PER_TOUCH * mmap.PAGESIZE
    try:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        with os.fdopen(reader, "rb", buffering=0) as emptied, os.fdopen(writer, "wb", buffering=0):
            for start in range(0, len(view), step):
                pages = range(start, min(start + step, len(view)), mmap.PAGESIZE)
                written = os.writev(writer, [view[page : page + 1] for page in pages])
                emptied.read(written)
                if written < len(pages):  # some pages in front of one that is not to be had
                    return errno.EFAULT
    except OSError as error:
        return error.errno or errno.EIO
    return 0
