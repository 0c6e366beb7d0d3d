"""Descriptors of open files, with the flags and calls of the system at hand.

Windows has neither `preadv` nor most flags of open(2), and opens files as text unless told otherwise.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from io import FileIO

_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

READING = os.O_RDONLY | _COMMON
"""Flags that open a file or a folder for reading."""

WRITING = os.O_RDWR | _COMMON
"""Flags that open a file that is there for writing; Windows flushes no other."""

READING_AT_ONCE = READING | getattr(os, "O_NONBLOCK", 0)
"""The same for a file that may turn out to be a FIFO: opening it must not wait for a writer that never comes."""

MAX_BUFFERS = os.sysconf("SC_IOV_MAX") if hasattr(os, "sysconf") else 1024
"""Buffers that one call of `read_at` takes."""

_turns = threading.Lock()


def read_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read once into `buffers`, one after the other, from `offset` on, and return how many bytes came (preadv(2)).

    Any thread may call it at any time; on Windows threads read in turn, for a file has one position there.

    Raises:
        OSError: the system refused.
    """
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, buffers, offset)
    return _read_in_turn(descriptor, buffers, offset)


def flush_data(descriptor: int) -> None:
    """Wait until the disk has what was written to an open file; where fdatasync(2) is missing, all about it (fsync(2)).

    Raises:
        OSError: the system refused.
    """
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def _read_in_turn(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    count = 0
    with _turns, FileIO(descriptor, closefd=False) as file:
        file.seek(offset)
        for buffer in buffers:
            received = file.readinto(buffer) or 0
            count += received
            if received < buffer.nbytes:
                break
    return count
