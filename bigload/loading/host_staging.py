"""Cast and gather on the CPU: read a small block, and while it is in the cache write it where it belongs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bigload.loading.bytesource import ByteSource
from bigload.loading.huge_pages import allocate
from bigload.loading.report import Phase, Recorder
from bigload.loading.schedule import STAGED_BLOCK_BYTES, Piece, ReadJob
from bigload.loading.tensors import Memory, torch_dtype

_Blocks = dict[str, tuple[memoryview, torch.Tensor]]
"""Memory that one job is staged in, by use; each block twice, for those who read and for torch."""


class HostStager:
    """Delivers staged jobs into memory of the CPU (`engine.Stager`).

    There are as many blocks as jobs were under way at one moment, which bytes in flight bound, not one per thread. The
    one that came back last is lent first: most often to the same thread, whose cache still holds it.
    """

    def __init__(self, memory: Sequence[Memory], recorder: Recorder) -> None:
        self._memory = [_bytes_of(buffer) for buffer in memory]
        self._recorder = recorder
        self._idle: list[_Blocks] = []

    def carry(self, job: ReadJob, source: ByteSource) -> None:
        """Read the bytes of `job` into a block, and write its pieces to their buffers."""
        with self._lent() as blocks:
            view, staged = _block(blocks, "staged", job.num_bytes)
            source.read_into([view[: job.num_bytes]], job.offset)
            for piece in job.pieces:
                phase = Phase.COPY if piece.cast is None else Phase.CAST
                with self._recorder.span(phase, num_bytes=piece.num_bytes, file=job.file):
                    self._deliver(piece, staged, blocks)

    def finish(self) -> None:
        """Do nothing: what was carried has arrived."""

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = []
        self._idle = []

    @contextmanager
    def _lent(self) -> Iterator[_Blocks]:
        try:
            blocks = self._idle.pop()  # pop and append are atomic: no lock
        except IndexError:
            blocks = {}
        try:
            yield blocks
        finally:
            self._idle.append(blocks)

    def _deliver(self, piece: Piece, staged: torch.Tensor, blocks: _Blocks) -> None:
        target = self._memory[piece.buffer]
        assert target is not None, "a job for the CPU has pieces for the CPU"
        target = target[piece.start : piece.start + piece.memory_bytes].view(piece.rows, -1)
        rows = torch.as_strided(staged, (piece.rows, piece.row_bytes), (piece.stride, 1), piece.source)
        if piece.cast is None:
            target.copy_(rows)
            return
        stored, wanted = torch_dtype(piece.cast.stored), torch_dtype(piece.cast.wanted)
        assert stored is not None, "check_dtypes() comes first"
        assert wanted is not None, "check_dtypes() comes first"
        if piece.source % stored.itemsize or piece.stride % stored.itemsize:
            rows = rows.clone(memory_format=torch.contiguous_format)  # elements across the borders of the block's
        values, target = rows.view(stored), target.view(wanted)
        if {stored, wanted} == {torch.float16, torch.bfloat16}:
            # torch converts each of them from and to float32 several times as fast as to the other, and float32
            # holds both without rounding.
            _, scratch = _block(blocks, "scratch", 4 * values.numel())
            values = scratch.view(torch.float32)[: values.numel()].view(values.shape).copy_(values)
        target.copy_(values)


def _block(blocks: _Blocks, use: str, num_bytes: int) -> tuple[memoryview, torch.Tensor]:
    """Return the block for one `use`, kept for the next job: fresh memory for each would cost more than the cast."""
    block = blocks.get(use)
    if block is None or block[0].nbytes < num_bytes:
        memory = allocate(max(num_bytes, STAGED_BLOCK_BYTES))
        blocks[use] = block = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
    return block


def _bytes_of(memory: Memory) -> torch.Tensor | None:
    if isinstance(memory, torch.Tensor | memoryview) or not len(memory):
        return None  # another device's, or a file's, or nothing
    return torch.frombuffer(memory, dtype=torch.uint8)
