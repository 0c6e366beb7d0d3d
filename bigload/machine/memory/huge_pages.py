"""Buffers in huge pages: allocated, and faulted in ahead of their use; huge pages for memory of other allocators.

Fresh memory is the largest cost of a load: the kernel zeroes every page and enters it in the page table at its first
touch. A huge page (2 MiB) takes one fault where ordinary pages take 512.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from bigload.errors import NotEnoughMemoryError
from bigload.machine.files.byte_ranges import merged_ranges
from bigload.machine.libc import HAS_PAGE_CALLS
from bigload.machine.libc import libc as _libc
from bigload.machine.memory.ram import available_memory
from bigload.units import KIB, MIB

Buffer = mmap.mmap | bytearray | memoryview

HUGE_PAGE_BYTES = 2 * MIB

_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_MAX_GAP_BYTES = 64 * KIB  # between neighbours: headers of an allocator, and the rest of a page
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if HAS_PAGE_CALLS else {}  # Windows knows no other kind
_ENABLED, _MAPS = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/self/maps")


def allocate(num_bytes: int) -> Buffer:
    """Return writable, zeroed memory of at least `num_bytes`, in huge pages where the system has them.

    The memory goes back to the system when its last user (a tensor, a view) is gone. From 2 MiB on the size is rounded
    up to whole huge pages: Linux starts a map at a huge page only if it is as long as some (since 6.7; before, up to
    2 MiB at both ends are ordinary pages).
    """
    if num_bytes == 0:
        return bytearray()  # the system maps no empty memory
    if num_bytes >= HUGE_PAGE_BYTES:
        num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        buffer = mmap.mmap(-1, num_bytes, **_PRIVATE)
    except (OSError, OverflowError) as error:
        raise no_memory("a buffer", num_bytes) from error
    with suppress(OSError, AttributeError):  # a system without huge pages: slower, not wrong
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def prefault(buffer: Buffer, start: int, stop: int) -> bool:
    """Fault in bytes `start` to `stop` of a buffer of `allocate` without changing them.

    May be called from any thread, also while others read into the same bytes; it releases the GIL.
    Returns `False` before Linux 5.14 and on other systems, which cannot: the first touch then faults, as usual.
    """
    if start >= stop:
        return True
    if sys.platform != "linux":
        return False
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    if not _libc.madvise(address_of(buffer) + begin, stop - begin, _MADV_POPULATE_WRITE):
        return True
    if ctypes.get_errno() == errno.ENOMEM:
        raise no_memory("a buffer", stop - start)
    return False


def use_huge_pages(ranges: Iterable[tuple[int, int]]) -> None:
    """Have huge pages back the addresses in `ranges`, as (start, stop), which are to be written.

    For fresh memory of other allocators, such as torch's. They write a header before each block, which gives the 2 MiB
    around it ordinary pages, whatever is advised afterwards: those are collapsed (MADV_COLLAPSE, Linux 6.1). Contents
    stay the same. Memory that is mostly there already, maps of files and shared memory are left as they are.
    """
    wanted = merged_ranges(ranges, max_gap=_MAX_GAP_BYTES)  # what an allocator has put side by side
    try:
        if not wanted or "[never]" in _ENABLED.read_text("utf-8"):
            return
        maps = _MAPS.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # a system without huge pages: slower, not wrong
        return
    for start, stop in _overlaps(wanted, _private_ranges(maps)):
        begin, end = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, stop // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if begin < end and not _libc.madvise(begin, end - begin, mmap.MADV_HUGEPAGE):
            for address in range(begin, end, HUGE_PAGE_BYTES):
                if _is_mostly_absent(address):
                    _libc.madvise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE)  # fails where the first touch will do


def _private_ranges(maps: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield the private anonymous memory in lines of proc_pid_maps(5)."""
    for line in maps:
        addresses, permissions, _, _, inode, *_ = line.split(maxsplit=5)
        if permissions.endswith("p") and inode == "0":
            start, _, stop = addresses.partition("-")
            yield int(start, 16), int(stop, 16)


def _overlaps(wanted: list[tuple[int, int]], there: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield what both have in common; both are in rising order."""
    number = 0
    for start, stop in there:
        while number < len(wanted) and wanted[number][1] <= start:
            number += 1
        later = number
        while later < len(wanted) and wanted[later][0] < stop:
            yield max(wanted[later][0], start), min(wanted[later][1], stop)
            later += 1


def _is_mostly_absent(address: int) -> bool:
    """Return whether more than half of the pages of a huge page have yet to be touched (mincore(2))."""
    pages = (ctypes.c_ubyte * (HUGE_PAGE_BYTES // mmap.PAGESIZE))()
    return not _libc.mincore(address, HUGE_PAGE_BYTES, pages) and 2 * bytes(pages).count(0) > len(pages)


def address_of(buffer: Buffer) -> int:
    """Return where a writable, non-empty `buffer` begins in memory; good for as long as the caller holds it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def no_memory(what: str, num_bytes: int = 0) -> NotEnoughMemoryError:
    """Return the error for memory that the system refused, whatever it seems to have left; 0 where no size is known."""
    return NotEnoughMemoryError(
        what,
        needed_bytes=num_bytes,
        available_bytes=available_memory() or 0,
        hint="the system refused the memory; if it has enough, look at ulimit -v and vm.overcommit_memory",
    )
