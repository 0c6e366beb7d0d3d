"""Pages touched before each run, so that fresh memory costs every run the same; and what it costs otherwise.

A virtual machine may return free pages to its host (Linux: free page reporting), two seconds after they were freed.
The next process to touch them waits for the host, seconds per GiB at worst, which would be charged to the loader. So
touch memory last, right before what is timed. On bare metal this changes nothing.
"""

from __future__ import annotations

import statistics
import time

from bigload.machine.memory.huge_pages import Buffer, allocate, prefault
from bigload.machine.memory.ram import available_memory
from bigload.machine.threads.thread_pool import default_threads, run_jobs
from bigload.units import GIB, MIB

_PIECE_BYTES = 64 * MIB
_IDLE_SECONDS = 2.5
_MOST_TOUCHES = 5
_LEAST_DIFFERENCE = 1.5
"""Times longer than touches of memory that was just freed; less is what such figures differ by anyhow."""


def renew(num_bytes: int, *, share: float = 0.5) -> None:
    """Touch fresh memory and give it back, so that the system has `num_bytes` at hand.

    Half as much again, because not all that is given back is what the next process gets; at most `share` of what is
    available: half leaves the page cache what it holds. And again, until the host is not waited for.
    """
    available, num_bytes = available_memory(), num_bytes * 3 // 2
    if available is not None:
        num_bytes = min(num_bytes, int(available * share))
    seconds = [_touch_all(num_bytes)]
    while len(seconds) < _MOST_TOUCHES:
        seconds.append(_touch_all(num_bytes))
        if seconds[-2] <= _LEAST_DIFFERENCE * seconds[-1]:
            break


def fresh_memory_rate(num_bytes: int, *, repeats: int) -> int | None:
    """Return the bytes per second by which first touches of memory that was free for seconds are slower than others.

    `None` where they are not: a host takes back nothing, or there is none.
    """
    seconds = []
    for _ in range(repeats):
        renew(num_bytes)
        at_hand = _touch_all(num_bytes)
        time.sleep(_IDLE_SECONDS)
        seconds.append((_touch_all(num_bytes), at_hand))
    idle, at_hand = (statistics.median(each) for each in zip(*seconds, strict=True))
    return int(num_bytes / (idle - at_hand)) if idle > _LEAST_DIFFERENCE * at_hand else None


def _touch_all(num_bytes: int) -> float:
    """Touch fresh memory, free it, and return the seconds of touching."""
    buffers = [allocate(min(GIB, num_bytes - start)) for start in range(0, num_bytes, GIB)]
    pieces = [(buffer, start) for buffer in buffers for start in range(0, len(buffer), _PIECE_BYTES)]
    began = time.perf_counter()
    run_jobs(_touch, pieces, threads=default_threads())
    return time.perf_counter() - began


def _touch(piece: tuple[Buffer, int]) -> None:
    buffer, start = piece
    prefault(buffer, start, min(start + _PIECE_BYTES, len(buffer)))
