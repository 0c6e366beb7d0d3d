"""Columns of matrices into local tensors: short runs, one in each row of the file.

Runs with a page or more between them are read one by one, and so no bytes that nobody wants; others with what lies
between, which costs less than another call. Both go through the page cache: the ranks of a host want parts of the same
pages, and the disk is asked for them once.

Measured with 4 ranks on 2 cores, columns of 5.5 KB, 0.6 GB of matrices: by runs 0.30 to 0.33 s from the disk and
0.11 to 0.12 s from memory, by whole rows 0.33 to 0.43 and 0.09 to 0.19. As fast, then, for a quarter of the bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bigload.checkpoint.byte_source import ByteSource, read_strided, scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.loading.checks import unchanged
from bigload.loading.engine import opened_sources
from bigload.loading.schedule import CPU
from bigload.loading.tensors import torch_dtype
from bigload.machine.activities import NO_RECORDER
from bigload.machine.huge_pages import Buffer
from bigload.machine.inflight_pool import InflightPool
from bigload.machine.thread_pool import run_jobs
from bigload.parallel.sharded_loading.byte_ranges import StridedCopy
from bigload.parallel.sharded_loading.local_tensors import LocalTensor
from bigload.units import KIB, MIB

_STRIP_BYTES = 2 * MIB
"""How much of a file one job covers: what is copied from there should still be in the processor's cache."""

_RUNS_PER_STRIP = 2048
"""And how many calls it makes: a job is also what a thread takes at a time."""

_MOVED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What elements are taken for that only move, by their width in bytes."""

_STEP_ELEMENTS = 32 * KIB - 64
"""What torch copies at a time: from 32768 elements on it calls threads of its own, which want the cores of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strip:
    """`count` of the runs of `lines`, from number `first` on, and the tensor that they are for."""

    lines: StridedCopy
    tensor: LocalTensor
    first: int
    count: int

    @property
    def offset(self) -> int:
        return self.lines.start + self.first * self.lines.stride

    @property
    def is_read_by_runs(self) -> bool:
        return self.lines.stride - self.lines.run_bytes >= mmap.PAGESIZE

    @property
    def reach(self) -> int:
        """Bytes of the file from the first run to the last."""
        return (self.count - 1) * self.lines.stride + self.lines.run_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that are asked of the file."""
        return self.count * self.lines.run_bytes if self.is_read_by_runs else self.reach


def read_columns(checkpoint: Checkpoint, columns: Sequence[tuple[StridedCopy, LocalTensor]], *, threads: int) -> int:
    """Read `columns` into their tensors, and return how many bytes were asked of the files.

    Raises:
        ReadError: a file cannot be read to the end, or is not the one that was opened, or changed meanwhile.
    """
    strips = sorted(
        (strip for lines, tensor in columns for strip in _strips(lines, tensor)),
        key=lambda strip: (strip.lines.file, strip.offset),
    )
    files = sorted({strip.lines.file for strip in strips})
    scheme = scheme_of(checkpoint.root)
    largest = max((strip.read_bytes for strip in strips), default=0)
    pool = InflightPool(threads * max(largest, _STRIP_BYTES), is_prefaulted=False)
    with (
        unchanged(checkpoint, files),
        opened_sources(files, lambda file: scheme.open(checkpoint.root / file, NO_RECORDER)) as sources,
    ):

        def read(strip: _Strip) -> None:
            _read(strip, sources[strip.lines.file], pool)

        run_jobs(read, strips, threads=min(threads, max(len(strips), 1)))
    return sum(strip.read_bytes for strip in strips)


def _strips(lines: StridedCopy, tensor: LocalTensor) -> Iterator[_Strip]:
    step = max(min(_STRIP_BYTES // max(lines.stride, 1), _RUNS_PER_STRIP), 1)
    for first in range(0, lines.count, step):
        yield _Strip(lines=lines, tensor=tensor, first=first, count=min(step, lines.count - first))


def _read(strip: _Strip, source: ByteSource, pool: InflightPool) -> None:
    lines, part = strip.lines, strip.tensor.part
    is_kept = torch_dtype(part.stored.dtype) == part.dtype
    if strip.is_read_by_runs and is_kept and part.device_name == CPU and lines.target_step == 1:
        width = part.dtype.itemsize
        first = lines.target + strip.first * lines.target_stride
        view = memoryview(strip.tensor.memory)[strip.tensor.start + first * width :]  # type: ignore[arg-type]
        _read_runs(strip, view, lines.target_stride * width, source)
        return
    with pool.lend(max(strip.read_bytes, _STRIP_BYTES)) as block:
        view = memoryview(block)
        if strip.is_read_by_runs:
            _read_runs(strip, view, lines.run_bytes, source)
            stride = lines.run_bytes
        else:
            source.read_into([view[: strip.reach]], strip.offset)
            stride = lines.stride
        _deliver(strip, block, stride)


def _read_runs(strip: _Strip, view: memoryview, apart: int, source: ByteSource) -> None:
    """Read the runs of `strip` into `view`, each `apart` bytes after the last."""
    lines, offset, count = strip.lines, strip.offset, strip.count
    read_strided(source, view, offset=offset, stride=lines.stride, run_bytes=lines.run_bytes, count=count, apart=apart)


def _deliver(strip: _Strip, block: Buffer, stride_bytes: int) -> None:
    """Copy what was read into `block`, in runs `stride_bytes` apart, to where it belongs, cast as it is asked for."""
    lines, part = strip.lines, strip.tensor.part
    stored, whole = torch_dtype(part.stored.dtype), strip.tensor.tensor
    assert stored is not None, "torch has the dtypes of all that is loaded"
    if stored == part.dtype:  # what only moves: torch copies no packed types
        stored = _MOVED_AS[stored.itemsize]
        whole = whole.view(stored)
    run = lines.run_bytes // stored.itemsize
    source = torch.frombuffer(block, dtype=torch.uint8).view(stored)
    source = source.as_strided((strip.count, run), (stride_bytes // stored.itemsize, 1))
    target = whole.as_strided(
        (strip.count, run),
        (lines.target_stride, lines.target_step),
        whole.storage_offset() + lines.target + strip.first * lines.target_stride,
    )
    step = max(_STEP_ELEMENTS // run, 1) if part.device_name == CPU else strip.count
    for first in range(0, strip.count, step):
        target[first : first + step].copy_(source[first : first + step])
