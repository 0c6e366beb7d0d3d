"""Page cache: count the cached bytes of a file (mincore(2)), and evict them (posix_fadvise(2)).

The choice between reads through and past the cache, and the cold runs of benchmarks, depend on it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bigload.descriptors import READING_AT_ONCE, flush_data
from bigload.machine.libc import MAP_FAILED
from bigload.machine.libc import libc as _libc
from bigload.machine.libc import quick_libc as _quick_libc
from bigload.units import MIB

_CAP_FOWNER = 3
_NOBODY = 65534
_CACHESTAT = 451
_QUICK_BYTES = 16 * MIB  # 0.1 ms
"""Number of the system call, the same on all architectures but alpha (Linux 6.5)."""


def cached_bytes(path: Path, ranges: Iterable[tuple[int, int]] | None = None) -> int | None:
    """Return how many bytes of `path`, or of the given (start, stop) ranges of it, are in the page cache (mincore(2)).

    `None` if the kernel does not report it. Only Linux does, and since 5.2 it reports everything as cached to users who
    neither own a file nor may write to it. Ranges past the end of the file have nothing cached. 4 GiB take about 60 ms.

    Raises:
        OSError: the file cannot be opened or mapped.
    """
    if sys.platform != "linux":  # mincore of macOS says other things of a page as well
        return None
    with _opened(path) as descriptor:
        status = os.fstat(descriptor)
        if not _may_ask(path, status.st_uid):
            return None
        size = status.st_size
        asked = [(0, size)] if ranges is None else [(start, min(stop, size)) for start, stop in ranges]
        asked = [(start, stop) for start, stop in asked if start < stop]
        return _count(path, descriptor, size, asked) if asked else 0


def cached_pages(descriptor: int, start: int, stop: int) -> int | None:
    """Return how many pages that hold bytes `start` to `stop` of an open file are in the page cache (cachestat(2)).

    One call without a map, about 6 ms per GiB; `None` where the system has none, or does not tell this user.
    """
    asked, found = (ctypes.c_uint64 * 2)(start, stop - start), (ctypes.c_uint64 * 5)()
    if start >= stop:  # no length stands for the rest of the file
        return 0
    if sys.platform != "linux":  # elsewhere the number is that of another call
        return None
    library = _quick_libc if stop - start <= _QUICK_BYTES else _libc
    failed = library.syscall(_CACHESTAT, descriptor, asked, found, 0)
    return None if failed else int(found[0])


def has_all_cached(path: Path, start: int, stop: int) -> bool:
    """Return whether the page cache is known to have bytes `start` to `stop` of `path`, all of them."""
    try:
        with _opened(path) as descriptor:
            pages = cached_pages(descriptor, start, stop)
    except OSError:
        return False
    return pages is not None and pages >= pages_between(start, stop)


def pages_between(start: int, stop: int) -> int:
    """Return how many pages hold bytes `start` to `stop`."""
    return -(-stop // mmap.PAGESIZE) - start // mmap.PAGESIZE


def probe_cached(path: Path, ranges: Iterable[tuple[int, int]]) -> int | None:
    """Return the bytes of those `ranges` of which some page is cached: an estimate, also for files of other users.

    The page is drawn at random: Linux begins to read a page that it does not have, so the next probe would find it.

    `None` where the system or the file system cannot read from the page cache alone (RWF_NOWAIT of preadv2(2)).

    Raises:
        OSError: the file cannot be opened or read.
    """
    if sys.platform != "linux":
        return None
    cached = 0
    with _opened(path) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no more than that page
        for start, stop in ranges:
            try:
                if os.preadv(descriptor, [bytearray(1)], random.randrange(start, stop), os.RWF_NOWAIT):
                    cached += stop - start
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    return None
                raise
    return cached


def cached_fraction(paths: Iterable[Path]) -> float | None:
    """Return which part of the bytes of `paths`, 0 to 1, is in the page cache; `None` if the kernel would not say."""
    cached = total = 0
    for path in paths:
        in_memory = cached_bytes(path)
        if in_memory is None:
            return None
        cached, total = cached + in_memory, total + path.stat().st_size
    return cached / total if total else 0.0


def evict(paths: Iterable[Path]) -> int | None:
    """Have the kernel drop the cached pages of `paths`; return how many bytes it kept (`None`: it would not say).

    It keeps pages that some process has mapped and touched, and all pages of file systems that live in memory.

    Raises:
        OSError: a file cannot be opened, or not written back: changed pages cannot be dropped.
    """
    kept: int | None = 0
    for path in paths:
        with _opened(path) as descriptor:
            flush_data(descriptor)
            evict_pages(descriptor)
        remaining = cached_bytes(path)
        kept = None if kept is None or remaining is None else kept + remaining
    return kept


def drop_cached_pages(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Have the kernel drop the cached pages of these (start, stop) ranges of `path`, as far as nobody else uses them.

    Raises:
        OSError: the file cannot be opened.
    """
    with _opened(path) as descriptor:
        for start, stop in ranges:
            evict_pages(descriptor, start, stop - start)


def evict_pages(descriptor: int, start: int = 0, num_bytes: int = 0) -> None:
    """Have the kernel drop cached pages of an open file; 0 bytes are all from `start` on. macOS and Windows keep them.

    Raises:
        OSError: the file system takes no such hints.
    """
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, READING_AT_ONCE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _may_ask(path: Path, owner: int) -> bool:
    """Return whether mincore tells this process the truth (can_do_mincore in mm/mincore.c of Linux)."""
    if owner == os.geteuid() or os.access(path, os.W_OK, effective_ids=True):
        return True
    # Root in a container has no power over files of users that the container does not know.
    return owner != _NOBODY and bool(_capabilities() >> _CAP_FOWNER & 1)


def _capabilities() -> int:
    try:
        status = Path("/proc/thread-self/status").read_text("utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def _count(path: Path, descriptor: int, size: int, ranges: list[tuple[int, int]]) -> int:
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == MAP_FAILED:
        raise OSError(ctypes.get_errno(), "cannot map", str(path))
    try:
        return sum(_count_range(path, address, start, stop) for start, stop in ranges)
    finally:
        _libc.munmap(address, size)


def _count_range(path: Path, address: int, start: int, stop: int) -> int:
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    pages = bytearray(-(-(stop - begin) // mmap.PAGESIZE))
    if _libc.mincore(address + begin, stop - begin, (ctypes.c_char * len(pages)).from_buffer(pages)):
        raise OSError(ctypes.get_errno(), "cannot ask which pages are cached", str(path))
    cached = (len(pages) - pages.count(0)) * mmap.PAGESIZE
    # The first and the last page may reach beyond the range.
    cached -= (start - begin) if pages[0] else 0
    cached -= (begin + len(pages) * mmap.PAGESIZE - stop) if pages[-1] else 0
    return cached
