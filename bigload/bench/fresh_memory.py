"""Pages touched before each run, so that fresh memory costs every run the same.

A virtual machine may return free pages to its host (Linux: free page reporting), two seconds after they were freed.
The next process to touch them waits for the host, seconds per GiB at worst, which would be charged to the loader. So
touch memory last, right before what is timed. On bare metal this changes nothing.
"""

from __future__ import annotations

from bigload.machine.huge_pages import Buffer, allocate, prefault
from bigload.machine.memory import available_memory
from bigload.machine.thread_pool import default_threads, run_jobs
from bigload.units import GIB, MIB

_PIECE_BYTES = 64 * MIB


def renew(num_bytes: int) -> None:
    """Touch fresh memory and give it back, so that the system has `num_bytes` at hand.

    Half as much again, because not all that is given back is what the next process gets; at most half of what is
    available: what the page cache holds shall stay there.
    """
    available, num_bytes = available_memory(), num_bytes * 3 // 2
    num_bytes = num_bytes if available is None else min(num_bytes, available // 2)
    buffers = [allocate(min(GIB, num_bytes - start)) for start in range(0, num_bytes, GIB)]
    pieces = [(buffer, start) for buffer in buffers for start in range(0, len(buffer), _PIECE_BYTES)]
    run_jobs(_touch, pieces, threads=default_threads())


def _touch(piece: tuple[Buffer, int]) -> None:
    buffer, start = piece
    prefault(buffer, start, min(start + _PIECE_BYTES, len(buffer)))
