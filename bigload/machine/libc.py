"""Calls of the C library that Python's standard library lacks (ctypes releases the GIL during each).

Windows has the first two of them; whoever calls another asks `HAS_PAGE_CALLS` first.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import TypeVar

_Library = TypeVar("_Library", ctypes.CDLL, ctypes.PyDLL)


def _c_library(kind: type[_Library]) -> _Library:
    try:
        return kind(None, use_errno=True)
    except TypeError:  # Windows has no handle of the whole process
        return kind("ucrtbase", use_errno=True)


libc = _c_library(ctypes.CDLL)

quick_libc = _c_library(ctypes.PyDLL)
"""For calls that are over at once: these keep the GIL, which costs a thread more to get back than they take."""

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
