"""Which bytes are read, in what order, and where they go: a pure function from wanted tensors to read jobs.

The CPU's memory is taken in one large buffer per file, not in one allocation per tensor: a page fault for every 4 KiB
of every tensor is what makes naive loading slow. Tensors lie in their buffer at multiples of 64 bytes whatever their
place in the file, because arithmetic on misaligned elements is slow where it works at all. Accelerators have no such
faults, and an allocator of their own that cuts large blocks up: there each tensor has a buffer.

Most bytes are read straight to where they stay. Three kinds are staged, in small blocks of memory that are used again
and again: what becomes another dtype, what goes to an accelerator, and columns, which lie in the file in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType
from bigload.loading.slices import Rows, Slice, rows_of, sliced_shape
from bigload.units import KIB, MIB

ALIGNMENT = 64
BLOCK_BYTES = 16 * MIB
"""Size of a read: large enough to drown the cost of the call, small enough to share a shard among threads."""

STAGED_BLOCK_BYTES = 2 * MIB
"""Size of a read that is cast or gathered on the CPU: the bytes should still be in its cache when that happens."""

MAX_GAP_BYTES = 64 * KIB
"""Columns further apart than this are read one by one; others with what lies between them: a read costs more."""

MAX_GATHERED_ROW_BYTES = 256 * KIB
"""And so are those of longer rows: a read of a whole row is long enough for itself."""

MAX_SCATTERED_PIECES = 1024
"""In one read: about as many as one call of the system takes."""

CPU = "cpu"
_PAGE_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A stored tensor, or a part of it, and what it shall be in memory: its dtype and its device (`cpu`, `cuda:0`)."""

    tensor: TensorInfo
    dtype: DType
    part: Slice | None = None
    place: str = CPU

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in elements of the stored dtype."""
        return sliced_shape(self.tensor, self.part)

    @property
    def num_bytes(self) -> int:
        """Bytes in memory; of a view that is not stored row by row, those from its first element to its last."""
        if self.tensor.strides is not None:
            return self.tensor.span.num_bytes * self.dtype.bits // self.tensor.dtype.bits
        return prod(self.shape) * self.dtype.bits // 8

    @property
    def is_cast(self) -> bool:
        return self.dtype != self.tensor.dtype


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Memory to take: `num_bytes` on `place`, for tensors of `file`; or that file's own pages, mapped."""

    place: str
    file: str
    num_bytes: int
    is_map: bool = False


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a tensor lies in memory: `buffer` is a position in `Schedule.buffers`."""

    wanted: Wanted
    buffer: int
    start: int


@dataclass(frozen=True, slots=True)
class Cast:
    """From the dtype in the file to the one in memory."""

    stored: DType
    wanted: DType


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a read that belong together: `rows` times `row_bytes`, `stride` apart, the first at byte `source`.

    They go, without gaps, to byte `start` of a buffer and on; `cast` on the way, if that is not `None`.
    """

    source: int
    row_bytes: int
    buffer: int
    start: int
    rows: int = 1
    stride: int = 0
    cast: Cast | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, without those between the rows."""
        return self.rows * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory."""
        return self.num_bytes if self.cast is None else self.num_bytes * self.cast.wanted.bits // self.cast.stored.bits


class Way(Enum):
    """How the bytes of a read get to their buffers."""

    STRAIGHT = "read into them"
    SCATTERED = "read into them, and what lies between them into memory that nobody looks at"
    STAGED = "read into a block, and copied or cast from there"
    POPULATED = "made present in the map of the file, where they stay"


@dataclass(frozen=True, slots=True)
class ReadJob:
    """One read: `num_bytes` of `file` from `offset` on, all for one device."""

    file: str
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]
    way: Way = Way.STRAIGHT
    place: str = CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Memory to take, where each tensor will lie in it, and the reads that fill it, in order."""

    buffers: tuple[BufferSpec, ...]
    slots: Mapping[str, Slot]
    jobs: tuple[ReadJob, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(job.num_bytes for job in self.jobs)

    def bytes_on(self, place: str) -> int:
        """Return the bytes of memory to take on `place`; pages of files are not counted."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.place == place and not buffer.is_map)


def schedule_reads(
    wanted: Iterable[Wanted], *, block_bytes: int = BLOCK_BYTES, in_map: bool = False, populate: bool = True
) -> Schedule:
    """Return the reads that bring `wanted` into memory: by file and offset, neighbours merged, cut into blocks.

    Tensors that lie in the same bytes (tied weights) and are wanted alike share one place in memory. Those whose bytes
    overlap otherwise, views of one storage in a torch file, do not.

    Args:
        wanted: At most once per name.
        block_bytes: The size of a read. One gathered row, or one element that is cast, may be larger.
        in_map: Leave in the pages of the file what can stay there: whole tensors and rows, as they are stored, for the
            CPU. The slots are then offsets into the file.
        populate: Make those pages present before the load ends; otherwise each is read when it is first touched.

    Example: 1-byte tensors of 10, 6 and 40 elements at offsets 100, 110 and 200 of one file, blocks of 32: a read of 16
    bytes at 100 in two pieces, one of 32 at 200 and one of 8 at 232; the tensors start at 0, 64 and 128 of one buffer.
    """
    by_file: dict[str, list[Wanted]] = {}
    for want in sorted(wanted, key=lambda want: (want.tensor.span.file, want.tensor.span.start, want.name)):
        by_file.setdefault(want.tensor.span.file, []).append(want)
    memory = _Memory()
    jobs: list[ReadJob] = []
    for file, members in by_file.items():
        stretches: list[Stretch] = []
        for want in members:
            stays = in_map and _can_stay_in_map(want)
            if memory.place(want, in_map=stays) and want.num_bytes and (populate or not stays):
                stretches += _stretches_of(want, memory.slots[want.name], stays=stays)
        jobs += jobs_of(file, stretches, block_bytes)
    return Schedule(buffers=memory.buffers(), slots=memory.slots, jobs=tuple(jobs))


def _can_stay_in_map(want: Wanted) -> bool:
    rows = rows_of(want.tensor, want.part)
    is_aligned = rows.start % max(want.dtype.bits // 8, 1) == 0
    return want.place == CPU and not want.is_cast and rows.count == 1 and is_aligned


class _Memory:
    """Gives every wanted tensor its place in a buffer."""

    def __init__(self) -> None:
        self.slots: dict[str, Slot] = {}
        self._numbers: dict[tuple[str, str, bool, str], int] = {}
        self._sizes: list[int] = []
        self._shared: dict[tuple[object, ...], Slot] = {}

    def place(self, want: Wanted, *, in_map: bool) -> bool:
        """Give `want` a slot; return whether its bytes have to be read: not if another one has the same."""
        same = (want.tensor.span, want.tensor.dtype, want.part, want.dtype, want.place)
        twin = self._shared.get(same)
        if twin is not None and want.num_bytes:
            self.slots[want.name] = Slot(want, twin.buffer, twin.start)
            return False
        key = (want.tensor.span.file, want.place, in_map, "" if want.place == CPU else want.name)
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._sizes):
            self._sizes.append(0 if in_map or want.place != CPU else _first_start(want))
        if in_map:
            rows = rows_of(want.tensor, want.part)
            start = rows.start
            self._sizes[number] = max(self._sizes[number], rows.start + rows.num_bytes)
        else:
            start = self._sizes[number]
            self._sizes[number] += want.num_bytes if want.place != CPU else -(-want.num_bytes // ALIGNMENT) * ALIGNMENT
        self.slots[want.name] = self._shared[same] = Slot(want, number, start)
        return True

    def buffers(self) -> tuple[BufferSpec, ...]:
        return tuple(
            BufferSpec(place, file, num_bytes, is_map)
            for (file, place, is_map, _), num_bytes in zip(self._numbers, self._sizes, strict=True)
        )


def _first_start(want: Wanted) -> int:
    """Return where the first tensor of a file begins in its buffer: as far into a page as in the file, if aligned.

    Most tensors are a multiple of 64 bytes long, so those after it lie like it, and direct reads can go in place.
    """
    into_page = want.tensor.span.start % _PAGE_BYTES
    return into_page if into_page % ALIGNMENT == 0 else 0


@dataclass(slots=True)
class Stretch:
    """Bytes of a file that are delivered alike, and may be cut between rows, or between units of a single row."""

    offset: int
    piece: Piece
    way: Way
    place: str
    unit: int

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last, those between the rows included."""
        return (self.piece.rows - 1) * self.piece.stride + self.piece.row_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest part that can be cut off."""
        return self.unit if self.piece.rows == 1 else self.piece.row_bytes

    def cut(self, room: int) -> tuple[Stretch, Stretch | None]:
        """Return as much as fits into `room` bytes, but at least the smallest part, and the rest."""
        piece = self.piece
        if self.num_bytes <= room:
            return self, None
        if piece.rows == 1:
            taken = max(room // self.unit, 1) * self.unit
            if taken >= piece.row_bytes:
                return self, None
            return self._split(taken, head=(1, taken), tail=(1, piece.row_bytes - taken))
        rows = max((room - piece.row_bytes) // piece.stride + 1, 1)
        return self._split(rows * piece.stride, head=(rows, piece.row_bytes), tail=(piece.rows - rows, piece.row_bytes))

    def _split(self, step: int, *, head: tuple[int, int], tail: tuple[int, int]) -> tuple[Stretch, Stretch]:
        piece = self.piece
        first = Piece(0, head[1], piece.buffer, piece.start, head[0], piece.stride if head[0] > 1 else 0, piece.cast)
        start = piece.start + first.memory_bytes
        second = Piece(0, tail[1], piece.buffer, start, tail[0], piece.stride if tail[0] > 1 else 0, piece.cast)
        return (
            Stretch(self.offset, first, self.way, self.place, self.unit),
            Stretch(self.offset + step, second, self.way, self.place, self.unit),
        )


def _stretches_of(want: Wanted, slot: Slot, *, stays: bool) -> Iterator[Stretch]:
    cast = Cast(want.tensor.dtype, want.dtype) if want.is_cast else None
    way = Way.POPULATED if stays else Way.STRAIGHT if cast is None and want.place == CPU else Way.STAGED
    rows = rows_of(want.tensor, want.part)
    for stretch in stretches(rows, slot.buffer, slot.start, cast=cast, way=way, place=want.place):
        if stretch.piece.rows > 1:
            stretch.way = Way.STAGED
        yield stretch


def stretches(
    rows: Rows, buffer: int, start: int, *, cast: Cast | None = None, way: Way = Way.SCATTERED, place: str = CPU
) -> Iterator[Stretch]:
    """Yield what delivers `rows` to byte `start` of a buffer and on: all rows as one stretch, or each by itself."""
    unit = max(cast.stored.bits // 8, 1) if cast is not None else 1
    gap = rows.stride - rows.row_bytes
    is_gathered = rows.count > 1 and gap <= MAX_GAP_BYTES and rows.stride <= MAX_GATHERED_ROW_BYTES
    if rows.count == 1 or is_gathered:
        stride = rows.stride if rows.count > 1 else 0
        yield Stretch(rows.start, Piece(0, rows.row_bytes, buffer, start, rows.count, stride, cast), way, place, unit)
        return
    for row in range(rows.count):
        piece = Piece(0, rows.row_bytes, buffer, start, cast=cast)
        yield Stretch(rows.start + row * rows.stride, piece, way, place, unit)
        start += piece.memory_bytes


@dataclass(slots=True)
class _OpenJob:
    """A job that neighbours may still join."""

    file: str
    offset: int
    way: Way
    place: str
    num_bytes: int = 0
    pieces: list[Piece] = field(default_factory=list)

    def takes(self, stretch: Stretch, block_bytes: int) -> bool:
        gap = stretch.offset - self.offset - self.num_bytes
        is_neighbour = 0 <= gap <= (MAX_GAP_BYTES if self.way is Way.SCATTERED else 0)
        is_alike = stretch.way is self.way and stretch.place == self.place
        if self.way is Way.SCATTERED and len(self.pieces) >= MAX_SCATTERED_PIECES:
            return False
        return is_neighbour and is_alike and self.num_bytes + gap + min(stretch.least_bytes, block_bytes) <= block_bytes

    def add(self, stretch: Stretch) -> None:
        piece, source = stretch.piece, stretch.offset - self.offset
        self.pieces.append(
            Piece(source, piece.row_bytes, piece.buffer, piece.start, piece.rows, piece.stride, piece.cast)
        )
        self.num_bytes = source + stretch.num_bytes

    def closed(self) -> ReadJob:
        # Nothing has to be delivered of pages that stay where they are.
        pieces = () if self.way is Way.POPULATED else tuple(self.pieces)
        return ReadJob(self.file, self.offset, self.num_bytes, pieces, self.way, self.place)


def jobs_of(file: str, stretches: Iterable[Stretch], block_bytes: int) -> Iterator[ReadJob]:
    """Yield the reads of `stretches` of `file`, in their order: neighbours merged, cut into blocks."""
    job: _OpenJob | None = None
    for stretch in stretches:
        rest: Stretch | None = stretch
        is_staged_here = stretch.way is Way.STAGED and stretch.place == CPU
        size = min(block_bytes, STAGED_BLOCK_BYTES) if is_staged_here else block_bytes
        while rest is not None:
            if job is None or not job.takes(rest, size):
                if job is not None:
                    yield job.closed()
                job = _OpenJob(file, rest.offset, rest.way, rest.place)
            part, rest = rest.cut(size - (rest.offset - job.offset))
            job.add(part)
    if job is not None:
        yield job.closed()
