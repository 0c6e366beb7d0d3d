"""Cast and gather on the CPU: read a small block, and while it is in the cache write it where it belongs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bigload.loading.bytesource import ByteSource
from bigload.loading.huge_pages import allocate
from bigload.loading.report import Phase, Recorder
from bigload.loading.schedule import STAGED_BLOCK_BYTES, Piece, ReadJob
from bigload.loading.tensors import Memory, torch_dtype


class HostStager:
    """Delivers staged jobs into memory of the CPU; each thread has a block of its own (`engine.Stager`)."""

    def __init__(self, memory: Sequence[Memory], recorder: Recorder) -> None:
        self._memory = [_bytes_of(buffer) for buffer in memory]
        self._recorder = recorder
        self._blocks = threading.local()

    def carry(self, job: ReadJob, source: ByteSource) -> None:
        """Read the bytes of `job` into this thread's block, and write its pieces to their buffers."""
        view, staged = self._block("staged", job.num_bytes)
        source.read_into([view[: job.num_bytes]], job.offset)
        for piece in job.pieces:
            phase = Phase.COPY if piece.cast is None else Phase.CAST
            with self._recorder.span(phase, num_bytes=piece.num_bytes, file=job.file):
                self._deliver(piece, staged)

    def finish(self) -> None:
        """Do nothing: what was carried has arrived."""

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = []
        self._blocks = threading.local()

    def _deliver(self, piece: Piece, staged: torch.Tensor) -> None:
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
            _, scratch = self._block("scratch", 4 * values.numel())
            values = scratch.view(torch.float32)[: values.numel()].view(values.shape).copy_(values)
        target.copy_(values)

    def _block(self, use: str, num_bytes: int) -> tuple[memoryview, torch.Tensor]:
        """Return this thread's block for one `use`, twice: fresh memory for each would cost more than the cast."""
        block: tuple[memoryview, torch.Tensor] | None = getattr(self._blocks, use, None)
        if block is None or block[0].nbytes < num_bytes:
            memory = allocate(max(num_bytes, STAGED_BLOCK_BYTES))
            block = memoryview(memory), torch.frombuffer(memory, dtype=torch.uint8)
            setattr(self._blocks, use, block)
        return block


def _bytes_of(memory: Memory) -> torch.Tensor | None:
    if isinstance(memory, torch.Tensor | memoryview) or not len(memory):
        return None  # another device's, or a file's, or nothing
    return torch.frombuffer(memory, dtype=torch.uint8)
