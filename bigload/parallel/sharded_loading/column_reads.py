"""Columns of matrices into local tensors: short runs, one in each row of the file.

Runs with a page or more between them are read one by one; others with the bytes between them, which cost less than
another call. Both go through the page cache: the ranks of a host read parts of the same pages, and the disk is read
once.

Measured with 4 ranks on 2 cores, columns of 5.5 KB, 0.6 GB of matrices: by runs 0.30 to 0.33 s from the disk and
0.11 to 0.12 s from memory, by whole rows 0.33 to 0.43 and 0.09 to 0.19. As fast, then, for a quarter of the bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bigload.checkpoint.byte_source import ByteSource, expect_reads, read_strided, scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.loading.checks import unchanged
from bigload.loading.scheduling.piece_copies import StridedCopy
from bigload.loading.scheduling.read_jobs import CPU
from bigload.loading.source_pool import MAX_OPEN_FILES, opened_sources
from bigload.loading.tensors.views import torch_dtype
from bigload.machine.threads.activities import NO_RECORDER
from bigload.machine.threads.inflight_pool import InflightPool
from bigload.machine.threads.thread_pool import run_jobs
from bigload.parallel.sharded_loading.local_tensors import LocalTensor, copy_runs
from bigload.units import MIB

_STRIP_BYTES = 2 * MIB
"""Bytes of a file that one job covers: they should still be in the processor's cache when they are copied."""

_RESPONSE_BYTES = 32 * MIB
"""Bytes of a remote file that a thread takes at a time, and one response serves."""

_RUNS_PER_STRIP = 2048
"""Calls of one job at most: a thread takes one job at a time."""

_Job = list[tuple[StridedCopy, LocalTensor]]
"""One strip that is read run by run, or strips that are read together with what lies between their runs."""


def read_columns(checkpoint: Checkpoint, columns: Sequence[tuple[StridedCopy, LocalTensor]], *, threads: int) -> int:
    """Read `columns` into their tensors, and return how many bytes were asked of the files."""
    jobs = list(_jobs([(strip, tensor) for copy, tensor in columns for strip in _strips(copy)]))
    files = sorted({strip.file for job in jobs for strip, _ in job})
    scheme = scheme_of(checkpoint.root)
    largest = max(map(_read_bytes, jobs), default=0)
    pool = InflightPool(threads * max(largest, _STRIP_BYTES), is_prefaulted=False)
    limit = MAX_OPEN_FILES if scheme.is_local else len(files)
    with (
        unchanged(checkpoint, files),
        opened_sources(files, lambda file: scheme.open(checkpoint.root / file, NO_RECORDER), limit=limit) as sources,
    ):

        def read(taken: list[_Job]) -> None:
            with sources.lend(taken[0][0][0].file) as source:
                if not scheme.is_local:
                    expect_reads(source, [edges for job in taken for edges in _ranges(job)])
                for job in taken:
                    _read(job, source, pool)

        taken = _neighbours(jobs) if not scheme.is_local else [[job] for job in jobs]
        run_jobs(read, taken, threads=min(threads, max(len(taken), 1)))
    return sum(map(_read_bytes, jobs))


def _strips(copy: StridedCopy) -> Iterator[StridedCopy]:
    step = max(min(_STRIP_BYTES // max(copy.stride, 1), _RUNS_PER_STRIP), 1)
    for first in range(0, copy.count, step):
        start, target = copy.start + first * copy.stride, copy.target + first * copy.target_stride
        yield replace(copy, start=start, count=min(step, copy.count - first), target=target)


def _jobs(strips: list[tuple[StridedCopy, LocalTensor]]) -> Iterator[_Job]:
    """Yield strips in the order of the files; those of interleaved runs together, since one read has them all."""
    strips.sort(key=lambda each: (each[0].file, _is_read_by_runs(each[0]), each[0].start))
    job: _Job = []
    for each in strips:
        strip = each[0]
        if job:
            last = job[-1][0]
            is_alone = _is_read_by_runs(strip) or _is_read_by_runs(last) or strip.file != last.file
            stop = strip.start + strip.reach
            is_near = strip.start < last.start + last.reach and stop - job[0][0].start <= 2 * _STRIP_BYTES
            if is_alone or not is_near:
                yield job
                job = []
        job.append(each)
    if job:
        yield job


def _neighbours(jobs: list[_Job]) -> list[list[_Job]]:
    """Return jobs as threads take them of a remote file: about as many bytes as one response should have."""
    found: list[list[_Job]] = []
    for job in jobs:
        first = found[-1][0][0][0] if found else None
        if first is None or job[0][0].file != first.file or not 0 <= job[0][0].start - first.start < _RESPONSE_BYTES:
            found.append([])
        found[-1].append(job)
    return found


def _ranges(job: _Job) -> Iterator[tuple[int, int]]:
    """Yield what `_read` reads, in its order."""
    first = job[0][0]
    if not _is_read_by_runs(first):
        yield first.start, first.start + _read_bytes(job)
        return
    for start in range(first.start, first.start + first.count * first.stride, first.stride):
        yield start, start + first.run_bytes


def _is_read_by_runs(strip: StridedCopy) -> bool:
    return strip.stride - strip.run_bytes >= mmap.PAGESIZE


def _read_bytes(job: _Job) -> int:
    """Return how many bytes are asked of the file."""
    first = job[0][0]
    if _is_read_by_runs(first):
        return first.num_bytes
    return max(strip.start + strip.reach for strip, _ in job) - first.start


def _read(job: _Job, source: ByteSource, pool: InflightPool) -> None:
    strip, tensor = job[0]
    part = tensor.part
    is_kept = torch_dtype(part.stored.dtype) == part.dtype
    if _is_read_by_runs(strip) and is_kept and part.device_name == CPU and strip.target_step == 1:
        width = part.dtype.itemsize
        view = memoryview(tensor.memory)[tensor.start + strip.target * width :]  # type: ignore[arg-type]
        _read_runs(strip, view, strip.target_stride * width, source)
        return
    num_bytes = _read_bytes(job)
    with pool.lend(max(num_bytes, _STRIP_BYTES)) as block:
        view = memoryview(block)
        if _is_read_by_runs(strip):
            _read_runs(strip, view, strip.run_bytes, source)
            copy_runs(strip, torch.frombuffer(block, dtype=torch.uint8), strip.run_bytes, tensor)
            return
        source.read_into([view[:num_bytes]], strip.start)
        for each, its in job:
            lying = torch.frombuffer(block, dtype=torch.uint8, offset=each.start - strip.start)
            width = its.part.stored.dtype.alignment
            copy_runs(each, lying[: len(lying) // width * width], each.stride, its)


def _read_runs(strip: StridedCopy, view: memoryview, apart: int, source: ByteSource) -> None:
    """Read the runs of `strip` into `view`, each `apart` bytes after the last."""
    form = {"stride": strip.stride, "run_bytes": strip.run_bytes, "count": strip.count}
    read_strided(source, view, offset=strip.start, apart=apart, **form)
