"""DTypeCast and gather on the CPU: read a small block, and while it is in the cache write it where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain

import torch

from bigload.checkpoint.byte_source import ByteSource
from bigload.loading.scheduling.read_jobs import Destination, DTypeCast, ReadJob, Spread
from bigload.loading.scheduling.read_requests import STAGED_BLOCK_BYTES
from bigload.loading.scheduling.strided_views import ViewPart
from bigload.loading.staging.openmp import without_team
from bigload.loading.tensors.views import MOVED_AS, Memory, spread_dtypes, torch_dtype
from bigload.machine.memory.huge_pages import Buffer, allocate
from bigload.machine.threads.activities import Phase, Recorder
from bigload.units import KIB

Blocks = dict[str, tuple[memoryview, torch.Tensor]]
"""Memory that one job is staged in, by use; each block twice, for those who read and for torch."""

_STEP_ELEMENTS = 1024 * KIB
"""What torch is given at a time: many enough that threads rarely wait for the interpreter."""

_SERIAL_ELEMENTS = 32 * KIB - 64
"""Likewise where torch cannot be kept from calling its own threads to help, which it does from 32768 elements on."""


class HostStager:
    """Delivers staged jobs into memory of the CPU (`engine.Stager`).

    There are as many blocks as jobs were under way at one moment, which bytes in flight bound, not one per thread. The
    one that came back last is lent first: most often to the same thread, whose cache still holds it.
    """

    def __init__(self, memory: Sequence[Memory], recorder: Recorder) -> None:
        self._memory = [_view_of(buffer) for buffer in memory]
        self._recorder = recorder
        self._idle: list[Blocks] = []

    def deliver(self, job: ReadJob, source: ByteSource) -> None:
        """Read the bytes of `job` into a block, and write its destinations to their buffers."""
        self.deliver_to(self._memory, job, source)

    def deliver_to(
        self,
        memory: Sequence[memoryview | None],
        job: ReadJob,
        source: ByteSource,
        *,
        beyond: list[int] | None = None,
    ) -> None:
        """Do it for buffers that are given now, as bytes.

        Where `beyond` has a number for each of them, count there the finite values that lie beyond the largest of the
        dtype that they are cast to: they become infinite, or no number, or that largest one.
        """
        with lent(self._idle) as blocks:
            staged, _ = block_of(blocks, "staged", job.num_bytes)
            source.read_into([staged[: job.num_bytes]], job.offset)
            for destination in job.destinations:
                target = memory[destination.buffer]
                assert target is not None, "a job for the CPU has destinations for the CPU"
                phase = Phase.COPY if destination.cast is None else Phase.CAST
                with self._recorder.span(phase, num_bytes=destination.num_bytes, file=job.file):
                    count = _deliver(destination, staged, target, blocks, counts=beyond is not None)
                    if beyond is not None:
                        beyond[destination.buffer] += count

    def arrange(self, part: ViewPart, target: memoryview, cast: DTypeCast, read: Callable[[memoryview], None]) -> int:
        """Have `read` fill a block with the bytes of `part`, and write its elements where they belong in `target`.

        Returns how many finite ones lie beyond the dtype that they are cast to.
        """
        stored, wanted = torch_dtype(cast.stored), torch_dtype(cast.wanted)
        if cast.stored == cast.wanted:
            stored = wanted = MOVED_AS[cast.stored.bits]
        assert stored is not None, "check_dtypes() comes first"
        assert wanted is not None, "check_dtypes() comes first"
        with lent(self._idle) as blocks:
            view, staged = block_of(blocks, "staged", part.rows.num_bytes)
            read(view[: part.rows.num_bytes])
            values = staged.view(stored).as_strided(part.shape, part.strides)
            written = bytes_in(target).view(wanted).as_strided(part.shape, part.target_strides, part.start)
            return cast_into(values, written, blocks, counts=True)

    def finish(self) -> None:
        """Do nothing: what was delivered has arrived."""

    def close(self) -> None:
        """Release the memory."""
        self._memory = []
        self._idle = []


def _deliver(destination: Destination, staged: memoryview, target: memoryview, blocks: Blocks, *, counts: bool) -> int:
    """Write one destination to its place in `target`; return how many values lie beyond its dtype, if it `counts`."""
    cast = destination.cast
    stored, wanted = (None, None) if cast is None else (torch_dtype(cast.stored), torch_dtype(cast.wanted))
    is_row = destination.rows == 1 and destination.spread is None
    if stored is not None and wanted is not None and is_row and destination.source % stored.itemsize == 0:
        # As nearly always; `torch.frombuffer` lets no other thread in, which each view of a tensor does.
        count = destination.row_bytes // stored.itemsize
        values = torch.frombuffer(staged, dtype=stored, count=count, offset=destination.source)
        written = torch.frombuffer(target, dtype=wanted, count=count, offset=destination.start)
        return cast_into(values, written, blocks, counts=counts)
    rows = torch.as_strided(
        bytes_in(staged), (destination.rows, destination.row_bytes), (destination.stride, 1), destination.source
    )
    memory = bytes_in(target)
    if destination.spread is not None:
        return _deliver_spread(destination, destination.spread, rows, memory, blocks, counts=counts)
    memory = memory[destination.start : destination.start + destination.memory_bytes].view(destination.rows, -1)
    if cast is None:
        for source, part in _steps(rows, memory):
            part.copy_(source)
        return 0
    assert stored is not None, "check_dtypes() comes first"
    assert wanted is not None, "check_dtypes() comes first"
    if destination.source % stored.itemsize or destination.stride % stored.itemsize:
        rows = rows.clone(memory_format=torch.contiguous_format)  # elements across the borders of the block's
    return cast_into(rows.view(stored), memory.view(wanted), blocks, counts=counts)


def _deliver_spread(
    destination: Destination,
    spread: Spread,
    rows: torch.Tensor,
    target: torch.Tensor,
    blocks: Blocks,
    *,
    counts: bool,
) -> int:
    stored, wanted = spread_dtypes(destination, spread)
    values = rows.clone(memory_format=torch.contiguous_format).view(stored)
    written = target[: target.numel() // wanted.itemsize * wanted.itemsize].view(wanted)
    strides, first = (spread.row_stride, spread.step), written.storage_offset() + destination.start // wanted.itemsize
    return cast_into(values, written.as_strided(values.shape, strides, first), blocks, counts=counts)


def cast_into(values: torch.Tensor, target: torch.Tensor, blocks: Blocks, *, counts: bool) -> int:
    """Write `values` to `target` in its dtype; return how many finite ones lie beyond it, if it `counts`."""
    edge = _edge(values.dtype, target.dtype) if counts else None
    scratch: memoryview | None = None
    if {values.dtype, target.dtype} == {torch.float16, torch.bfloat16}:
        # torch converts each of them from and to float32 several times as fast as to the other, and float32
        # holds both without rounding.
        scratch, _ = block_of(blocks, "scratch", 4 * _STEP_ELEMENTS)
    beyond = 0
    for stored, part in _steps(values, target):
        source = stored
        if scratch is not None:
            source = torch.frombuffer(scratch, dtype=torch.float32, count=stored.numel())
            source = source if stored.dim() == 1 else source.view(stored.shape)
            source.copy_(stored)
        part.copy_(source)
        if edge is not None:
            beyond += _num_beyond(source, edge)
    return beyond


def _steps(values: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield both in parts that belong together, for torch to copy in this thread, one after the other."""
    if values.numel() <= _SERIAL_ELEMENTS:
        yield values, target
        return
    with without_team() as is_alone:
        yield from _parts(values, target, _STEP_ELEMENTS if is_alone else _SERIAL_ELEMENTS)


def _parts(values: torch.Tensor, target: torch.Tensor, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Return both in parts of at most `most` elements, and compact where the shape allows it."""
    if values.numel() <= most:
        return iter([(values, target)])
    if values.is_contiguous() and target.is_contiguous():
        flat = (torch.unsafe_split(each.view(-1), most) for each in (values, target))  # without a step in Python
        return zip(*flat, strict=True)
    dim = max(range(values.dim()), key=lambda dim: values.shape[dim])
    size = -(-values.shape[dim] // 2)
    halves = zip(torch.split(values, size, dim), torch.split(target, size, dim), strict=True)
    return chain.from_iterable(_parts(*half, most) for half in halves)


@lru_cache
def _edge(stored: torch.dtype, wanted: torch.dtype) -> float | None:
    """Return from where on values of `stored` are no longer rounded to one of `wanted`, if finite ones can be there."""
    if not (stored.is_floating_point and wanted.is_floating_point):
        return None
    limit = torch.finfo(wanted)
    if limit.max >= torch.finfo(stored).max:
        return None
    _, exponent = math.frexp(limit.max)
    return limit.max + math.ldexp(limit.eps, exponent - 1) / 2  # half a step on


def _num_beyond(values: torch.Tensor, edge: float) -> int:
    """Return how many of `values` are finite and at `edge` or beyond it, on either side."""
    values = values.float() if values.itemsize == 1 else values  # 8-bit floats have no order in torch
    if values.numel() == 0:
        return 0
    lowest, highest = values.aminmax()
    if -edge < float(lowest) and float(highest) < edge:  # as nearly always; not with a NaN
        return 0
    return int((values.isfinite() & (values.abs() >= edge)).sum())


@contextmanager
def lent(idle: list[Blocks]) -> Iterator[Blocks]:
    """Lend the blocks that a thread used last, or none yet; they are idle again at the end."""
    try:
        blocks = idle.pop()  # pop and append are atomic: no lock
    except IndexError:
        blocks = {}
    try:
        yield blocks
    finally:
        idle.append(blocks)


def block_of(blocks: Blocks, use: str, num_bytes: int) -> tuple[memoryview, torch.Tensor]:
    """Return the block for one `use`, kept for the next job: fresh memory for each would cost more than the cast."""
    block = blocks.get(use)
    if block is None or block[0].nbytes < num_bytes:
        memory = allocate(max(num_bytes, STAGED_BLOCK_BYTES))
        blocks[use] = block = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
    return block


def _view_of(memory: Memory) -> memoryview | None:
    if isinstance(memory, torch.Tensor) or not len(memory):
        return None  # another device's, or nothing
    return memoryview(memory)


def bytes_in(memory: Buffer) -> torch.Tensor:
    """Return writable `memory` as a tensor of bytes that shares it."""
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else torch.empty(0, dtype=torch.uint8)
