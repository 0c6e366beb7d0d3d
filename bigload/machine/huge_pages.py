"""Buffers in huge pages: allocated, and faulted in ahead of their use.

Fresh memory is the largest cost of a load: the kernel zeroes every page and enters it in the page table at its first
touch. A huge page (2 MiB) takes one fault where ordinary pages take 512.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from contextlib import suppress

from bigload.errors import NotEnoughMemoryError
from bigload.machine.libc import libc as _libc
from bigload.machine.memory import available_memory
from bigload.units import MIB

Buffer = mmap.mmap | bytearray

HUGE_PAGE_BYTES = 2 * MIB

_MADV_POPULATE_WRITE = 23


def allocate(num_bytes: int) -> Buffer:
    """Return writable, zeroed memory of at least `num_bytes`, in huge pages where the system has them.

    The memory goes back to the system when its last user (a tensor, a view) is gone. From 2 MiB on the size is rounded
    up to whole huge pages: Linux starts a map at a huge page only if it is as long as some (since 6.7; before, up to
    2 MiB at both ends are ordinary pages).

    Raises:
        NotEnoughMemoryError: the system has no such piece of address space for this process.
    """
    if num_bytes == 0:
        return bytearray()  # the system maps no empty memory
    if num_bytes >= HUGE_PAGE_BYTES:
        num_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise no_memory("a buffer", num_bytes) from error
    with suppress(OSError):  # a system without huge pages: slower, not wrong
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def prefault(buffer: Buffer, start: int, stop: int) -> bool:
    """Fault in bytes `start` to `stop` of a buffer of `allocate` without changing them.

    May be called from any thread, also while others read into the same bytes; it releases the GIL.
    Returns `False` before Linux 5.14, which cannot: the first touch then faults, as usual.

    Raises:
        NotEnoughMemoryError: there is no memory for it.
    """
    if start >= stop:
        return True
    begin = start // mmap.PAGESIZE * mmap.PAGESIZE
    if not _libc.madvise(address_of(buffer) + begin, stop - begin, _MADV_POPULATE_WRITE):
        return True
    if ctypes.get_errno() == errno.ENOMEM:
        raise no_memory("a buffer", stop - start)
    return False


def address_of(buffer: Buffer | memoryview) -> int:
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
