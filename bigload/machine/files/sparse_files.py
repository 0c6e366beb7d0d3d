"""Holes in sparse files: where a file has data and where it only claims zeros (lseek(2), SEEK_DATA and SEEK_HOLE)."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

from bigload.machine.libc import libc

_PUNCH_HOLE_KEEP_SIZE = 3


def data_extents(descriptor: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of bytes `start` to `stop` that are stored; the rest are holes, which read as zeros.

    A file system that cannot tell reports one extent, all data, and so does Windows.
    """
    if not hasattr(os, "SEEK_DATA"):
        yield start, stop
        return
    position = start
    while position < stop:
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.ENOTSUP):
                yield position, stop
            elif error.errno != errno.ENXIO:
                raise
            return  # ENXIO: no data up to the end of the file
        if begin >= stop:
            return
        end = min(os.lseek(descriptor, begin, os.SEEK_HOLE), stop)
        yield begin, end
        position = end


def punch_hole(descriptor: int, start: int, stop: int) -> None:
    """Free the space of bytes `start` to `stop`, which then read as zeros, if the file system can (fallocate(2))."""
    libc.fallocate(descriptor, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(stop - start))
