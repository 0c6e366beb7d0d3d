"""Engine that executes a schedule: it fills the buffers by the read jobs, on one thread or several."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol

from bigload.checkpoint.byte_source import ByteSource, expect_reads
from bigload.checkpoint.sources.range_streams import MAX_GAP_BYTES, Shares
from bigload.errors import NotEnoughMemoryError
from bigload.loading.progress import OnProgress, Tally, ignore_progress
from bigload.loading.readers.mapped import MappedFile
from bigload.loading.scheduling.read_jobs import BLOCK_BYTES, CPU, Delivery, Destination, ReadJob
from bigload.loading.scheduling.schedule import Schedule
from bigload.loading.source_pool import SourcePool
from bigload.machine.memory.huge_pages import prefault
from bigload.machine.threads.activities import Phase, Recorder
from bigload.machine.threads.inflight_pool import InflightPool
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import MIB

if TYPE_CHECKING:
    from bigload.loading.digest_checks import DigestChecks
    from bigload.loading.tensors.views import Memory

_PREFAULT_BYTES = 64 * MIB


class Stager(Protocol):
    """Stages read jobs for one device through recycled blocks. Called from several threads.

    Calls, in order: `deliver` any number of times, `finish` after the last, `close` in every case.
    """

    def deliver(self, job: ReadJob, source: ByteSource) -> None:
        """Read the bytes of `job` and write them to its destinations, at the latest before `finish` returns."""

    def finish(self) -> None:
        """Wait until everything has arrived."""

    def close(self) -> None:
        """Release the blocks, also after an error; no copy is in flight when this returns."""


def read(
    schedule: Schedule,
    memory: Sequence[Memory],
    sources: SourcePool,
    stagers: Mapping[str, Stager],
    *,
    threads: int,
    max_inflight_bytes: int,
    recorder: Recorder,
    faults_ahead: bool = False,
    is_remote: bool = False,
    checks: DigestChecks | None = None,
    on_progress: OnProgress = ignore_progress,
) -> None:
    """Fill `memory` by all jobs of `schedule`, on `threads` threads, with at most `max_inflight_bytes` in flight.

    Args:
        schedule: What to read.
        memory: What `schedule.buffers` asks for, in their order.
        sources: The sources of all files of the schedule; the caller closes them.
        stagers: One for every device that a staged job is for.
        threads: Threads that read; 1 is the caller's own.
        max_inflight_bytes: The most that is being read or staged at one moment. A larger job goes alone.
        recorder: Records what each thread does.
        is_remote: A thread takes neighbouring reads that one response can serve.
        faults_ahead: Make memory ready in a thread of its own, ahead of the reads. It pays when they wait for a disk.
        checks: Checks digests of all that is read.
        on_progress: Called after every finished job.
    """
    tally = Tally(schedule.num_bytes, on_progress)
    inflight = InflightPool(max_inflight_bytes)

    def work(batch: Sequence[ReadJob]) -> None:
        largest = max(job.num_bytes for job in batch)
        with (
            sources.lend(batch[0].file) as source,
            inflight.hold(largest, waiting=partial(recorder.span, Phase.WAIT)),
        ):
            if is_remote:
                expect_reads(source, ((job.offset, job.offset + job.num_bytes) for job in batch))
            for job in batch:
                _carry(job, source, memory, stagers, recorder=recorder, checks=checks)
                if is_remote:  # a batch takes seconds
                    tally.add(job.num_bytes, phase="read", file=job.file)
        if not is_remote:
            tally.add(sum(job.num_bytes for job in batch), phase="read", file=batch[0].file)

    with _faulted_ahead(schedule, memory, recorder, wanted=faults_ahead):
        if checks is not None:
            batches = checks.batches(schedule.jobs)
        else:
            batches = _streams(schedule, threads) if is_remote else _batches(schedule.jobs)
        run_jobs(work, batches, threads=max(min(threads, len(schedule.jobs)), 1))
    for stager in stagers.values():
        stager.finish()


def _batches(jobs: Sequence[ReadJob]) -> Iterator[list[ReadJob]]:
    """Yield jobs of one file as threads take them: neighbours that are staged on the CPU together, for they are small.

    Fewer turns at the locks, and a thread writes to one stretch of memory; its one block holds one job at a time.
    """
    batch: list[ReadJob] = []
    for job in jobs:
        is_small = job.delivery is Delivery.STAGED and job.device == CPU
        if batch and not (is_small and _may_join(job, batch)):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _streams(schedule: Schedule, threads: int) -> Iterator[list[ReadJob]]:
    """Yield reads of a remote checkpoint as threads take them: neighbours in a file, which one response serves."""
    shares = Shares(schedule.num_bytes, threads=threads)
    batch: list[ReadJob] = []
    for job in schedule.jobs:
        if batch:
            first, last = batch[0], batch[-1]
            gap = job.offset - last.offset - last.num_bytes
            is_near = job.file == first.file and 0 <= gap <= MAX_GAP_BYTES
            if not is_near or job.offset + job.num_bytes - first.offset > max(shares.next_bytes, BLOCK_BYTES):
                shares.take(sum(each.num_bytes for each in batch))
                yield batch
                batch = []
        batch.append(job)
    if batch:
        yield batch


def _may_join(job: ReadJob, batch: list[ReadJob]) -> bool:
    last = batch[-1]
    is_alike = (last.file, last.delivery, last.device) == (job.file, job.delivery, job.device)
    return is_alike and sum(each.num_bytes for each in batch) + job.num_bytes <= BLOCK_BYTES


def _carry(
    job: ReadJob,
    source: ByteSource,
    memory: Sequence[Memory],
    stagers: Mapping[str, Stager],
    *,
    recorder: Recorder,
    checks: DigestChecks | None,
) -> None:
    if job.delivery is Delivery.POPULATED:
        assert isinstance(source, MappedFile), "only maps have pages to populate"
        stop = job.offset + job.num_bytes
        source.populate(job.offset, stop)
        if checks is not None:
            checks.update(job.file, job.offset, [source.buffer[job.offset : stop]])
        return
    reader = source if checks is None else checks.reading(job.file, source)
    if job.delivery is Delivery.STAGED:
        stagers[job.device].deliver(job, reader)
        return
    if recorder.is_tracing:
        _fault_in(job, memory, recorder)
    reader.read_into([_view(memory, destination) for destination in job.destinations], job.offset)


def _view(memory: Sequence[Memory], destination: Destination) -> memoryview:
    buffer = memory[destination.buffer]
    assert isinstance(buffer, mmap.mmap | bytearray | memoryview), "what goes elsewhere is staged"
    return memoryview(buffer)[destination.start : destination.start + destination.num_bytes]


def _fault_in(job: ReadJob, memory: Sequence[Memory], recorder: Recorder) -> None:
    with recorder.span(Phase.FAULT, num_bytes=job.num_bytes, file=job.file):
        for destination in job.destinations:
            buffer = memory[destination.buffer]
            assert isinstance(buffer, mmap.mmap | bytearray)
            prefault(buffer, destination.start, destination.start + destination.num_bytes)


@contextmanager
def _faulted_ahead(schedule: Schedule, memory: Sequence[Memory], recorder: Recorder, *, wanted: bool) -> Iterator[None]:
    """Make the memory of the CPU ready in a thread of its own while the context lasts."""
    if not wanted or recorder.is_tracing:  # a trace has a span for each fault, in the thread that would pay for it
        yield
        return
    stop = threading.Event()

    def fault() -> None:
        for spec, buffer in zip(schedule.buffers, memory, strict=True):
            if spec.device != CPU or spec.is_map or not isinstance(buffer, mmap.mmap):
                continue
            for start in range(0, spec.num_bytes, _PREFAULT_BYTES):
                if stop.is_set():
                    return
                with suppress(NotEnoughMemoryError):  # the read that needs the memory will say so
                    prefault(buffer, start, min(start + _PREFAULT_BYTES, spec.num_bytes))

    thread = threading.Thread(target=fault, name="bigload-faults", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
