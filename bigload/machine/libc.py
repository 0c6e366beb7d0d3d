"""Calls of the C library that Python's standard library lacks (ctypes releases the GIL during each).

Windows has the first two of them; whoever calls another asks `HAS_PAGE_CALLS` first.
"""

from __future__ import annotations

import ctypes
import mmap


def _c_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except TypeError:  # Windows has no handle of the whole process
        return ctypes.CDLL("ucrtbase", use_errno=True)


libc = _c_library()
libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)

HAS_PAGE_CALLS = hasattr(mmap, "PROT_READ")
"""Whether there are mmap, munmap, madvise and mincore; what they know is left to the kernel."""

if HAS_PAGE_CALLS:
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

MAP_FAILED = ctypes.c_void_p(-1).value
