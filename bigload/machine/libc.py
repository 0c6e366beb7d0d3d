"""System calls that Python's standard library lacks, by way of libc (ctypes releases the GIL during each)."""

from __future__ import annotations

import ctypes

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

MAP_FAILED = ctypes.c_void_p(-1).value
