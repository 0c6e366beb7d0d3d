"""Which pages of a file the kernel holds in memory, and how to make it let go of them.

Without this a benchmark of loading does not know whether it measured the disk or the memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_MAP_FAILED = ctypes.c_void_p(-1).value


def cached_fraction(paths: Iterable[Path]) -> float:
    """Return which part of the pages of `paths`, 0 to 1, is in the page cache (mincore(2))."""
    cached = total = 0
    for path in paths:
        in_memory, pages = _cached_pages(path)
        cached, total = cached + in_memory, total + pages
    return cached / total if total else 0.0


def evict(paths: Iterable[Path]) -> None:
    """Ask the kernel to drop the cached pages of `paths` (posix_fadvise(2)); `cached_fraction` tells whether it did."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _cached_pages(path: Path) -> tuple[int, int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        num_bytes = os.fstat(descriptor).st_size
        if num_bytes == 0:
            return 0, 0
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "cannot map", str(path))
        try:
            pages = ctypes.create_string_buffer(-(-num_bytes // mmap.PAGESIZE))
            if _libc.mincore(address, num_bytes, pages):
                raise OSError(ctypes.get_errno(), "cannot ask which pages are cached", str(path))
            return len(pages.raw) - pages.raw.count(b"\0"), len(pages.raw)
        finally:
            _libc.munmap(address, num_bytes)
    finally:
        os.close(descriptor)
