"""Carry out a schedule: take its buffers and fill them, on one thread or several."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from bigload.loading.bytesource import ByteSource
from bigload.loading.events import OnProgress, Tally, ignore_progress
from bigload.loading.schedule import ReadJob, Schedule
from bigload.loading.workers import run_jobs

Buffer = mmap.mmap | bytearray


def allocate(schedule: Schedule) -> list[Buffer]:
    """Return writable memory for the buffers of `schedule`, in huge pages where the system has them.

    The memory goes back to the system when its last user (a tensor, a view) is gone.
    """
    return [_allocate(num_bytes) for num_bytes in schedule.buffers]


def read(
    schedule: Schedule,
    buffers: Sequence[Buffer],
    open_source: Callable[[str], ByteSource],
    *,
    threads: int,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Fill `buffers` by all jobs of `schedule`, on `threads` threads.

    `open_source` opens a file of the checkpoint; every source is closed again, however this ends.

    Raises:
        ReadError: a read failed or came back short. The other threads have stopped.
    """
    with ExitStack() as opened:
        sources = {}
        for file in sorted({job.file for job in schedule.jobs}):
            sources[file] = open_source(file)
            opened.callback(sources[file].close)
        tally = Tally(schedule.num_bytes, on_progress)

        def work(job: ReadJob) -> None:
            pieces = [memoryview(buffers[piece.buffer])[piece.start : piece.stop] for piece in job.pieces]
            sources[job.file].read_into(pieces, job.offset)
            tally.add(job.num_bytes, phase="read", file=job.file)

        run_jobs(work, schedule.jobs, threads=threads)


def _allocate(num_bytes: int) -> Buffer:
    if num_bytes == 0:
        return bytearray()  # the system maps no empty memory
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A page fault per 2 MiB instead of per 4 KiB: faults, not copies, are what costs when memory is fresh.
    buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
