"""Which bytes are read, in what order, and where they go: a pure function from tensors to read jobs.

Memory is taken in one large buffer per shard, not in one allocation per tensor: a page fault for every 4 KiB of every
tensor is what makes naive loading slow. Tensors lie in the buffer at multiples of 64 bytes whatever their place in the
file, because arithmetic on misaligned elements is slow where it works at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bigload.checkpoint.model import TensorInfo
from bigload.units import MIB

ALIGNMENT = 64
BLOCK_BYTES = 16 * MIB
"""Size of a read: large enough to drown the cost of the call, small enough to share a shard among threads."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in memory: `buffer` is a position in `Schedule.buffers`."""

    tensor: TensorInfo
    buffer: int
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of a buffer."""

    buffer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One read: the bytes of `file` from `offset` on fill `pieces` one after the other."""

    file: str
    offset: int
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Buffers to take (their sizes), where each tensor will lie, and the reads that fill them in order."""

    buffers: tuple[int, ...]
    slots: Mapping[str, Slot]
    jobs: tuple[ReadJob, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(job.num_bytes for job in self.jobs)


def schedule_reads(tensors: Iterable[TensorInfo], *, block_bytes: int = BLOCK_BYTES) -> Schedule:
    """Return the reads that bring `tensors` into memory: by file and offset, neighbours merged, cut into blocks.

    Example: tensors of 10, 6 and 40 bytes at offsets 100, 110 and 200 of one file, blocks of 32: a read of 16 bytes at
    100 into two pieces, one of 32 at 200 and one of 8 at 232; the tensors start at 0, 64 and 128 of one buffer.
    """
    by_file: dict[str, list[TensorInfo]] = {}
    for tensor in sorted(tensors, key=lambda tensor: (tensor.span.file, tensor.span.start)):
        by_file.setdefault(tensor.span.file, []).append(tensor)
    buffers: list[int] = []
    slots: dict[str, Slot] = {}
    jobs: list[ReadJob] = []
    for file, members in by_file.items():
        position = 0
        for tensor in members:
            slots[tensor.name] = Slot(tensor, len(buffers), position)
            position += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        buffers.append(position)
        jobs += _jobs(file, [slots[tensor.name] for tensor in members if tensor.num_bytes], block_bytes)
    return Schedule(buffers=tuple(buffers), slots=slots, jobs=tuple(jobs))


def _jobs(file: str, slots: list[Slot], block_bytes: int) -> Iterator[ReadJob]:
    offset, pieces, room = 0, list[Piece](), 0
    for slot in slots:
        position, start = slot.tensor.span.start, slot.start
        stop = start + slot.tensor.num_bytes
        while start < stop:
            is_neighbour = bool(pieces) and position == offset + block_bytes - room
            if not is_neighbour or room == 0:
                if pieces:
                    yield ReadJob(file, offset, tuple(pieces))
                offset, pieces, room = position, [], block_bytes
            count = min(stop - start, room)
            pieces.append(Piece(slot.buffer, start, start + count))
            position, start, room = position + count, start + count, room - count
    if pieces:
        yield ReadJob(file, offset, tuple(pieces))
