"""Schedule of a load: a pure function from requested tensors to buffers and ordered read jobs.

The CPU's memory is taken in one large buffer per file, not in one allocation per tensor: a page fault for every 4 KiB
of every tensor is what makes naive loading slow. Tensors lie in their buffer at multiples of 64 bytes whatever their
position in the file, because arithmetic on misaligned elements is slow where it works at all. Accelerators have no such
faults, and an allocator of their own that cuts large blocks up: there each tensor has a buffer.

Most bytes are read straight to where they stay. Three kinds are staged, in small blocks of memory that are used again
and again: what becomes another dtype, what goes to an accelerator, and columns, which lie in the file in destinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import NamedTuple

from bigload.checkpoint.model import AssembledTensor, Span, TensorInfo
from bigload.dtypes import DType
from bigload.loading.scheduling.piece_copies import StridedCopy, strided_copies
from bigload.loading.scheduling.slices import Slice, StridedRange, rows_of, sliced_shape
from bigload.units import KIB, MIB

ALIGNMENT = 64
BLOCK_BYTES = 16 * MIB
"""Size of a read: large enough to drown the cost of the call, small enough to share a shard among threads."""

STAGED_BLOCK_BYTES = 2 * MIB
"""Size of a read that is cast or gathered on the CPU: the bytes should still be in its cache when that happens."""

MAX_GAP_BYTES = 64 * KIB
"""Columns further apart are read one by one; others with the gaps between them, which cost less than a read each."""

MAX_GATHERED_ROW_BYTES = 256 * KIB
"""Columns of longer rows are read one by one too: a read of a whole row is long enough."""

MAX_SCATTERED_PIECES = 1024
"""In one read: about as many as one call of the system takes."""

CPU = "cpu"
_PAGE_BYTES = 4 * KIB


class RequestedTensor(NamedTuple):
    """A stored tensor, or a part of it, or an assembled one, with its dtype and device (`cpu`, `cuda:0`) in memory."""

    tensor: TensorInfo | AssembledTensor
    dtype: DType
    part: Slice | None = None
    device: str = CPU

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in elements of the stored dtype; of an assembled tensor, torch's."""
        return self.tensor.shape if isinstance(self.tensor, AssembledTensor) else sliced_shape(self.tensor, self.part)

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape that torch gives it in memory; see `TensorInfo`."""
        if isinstance(self.tensor, AssembledTensor):
            return self.tensor.shape
        if self.part is None and not self.is_cast:
            return self.tensor.torch_shape
        return replace(self.tensor, dtype=self.dtype, shape=self.shape).torch_shape

    @property
    def num_bytes(self) -> int:
        """Bytes in memory; of a view that is not stored row by row, those from its first element to its last."""
        if isinstance(self.tensor, AssembledTensor):
            return self.tensor.num_elements * self.dtype.alignment
        if self.part is None:
            return self.tensor.span.num_bytes * self.dtype.bits // self.tensor.dtype.bits
        return prod(self.shape) * self.dtype.bits // 8

    @property
    def is_cast(self) -> bool:
        return self.dtype is not self.tensor.dtype and self.dtype != self.tensor.dtype

    @property
    def spans(self) -> tuple[Span, ...]:
        """The bytes of files that it lies in, those between its elements included."""
        if isinstance(self.tensor, AssembledTensor):
            return tuple(piece.tensor.span for piece in self.tensor.pieces)
        if self.part is None:
            return (self.tensor.span,)
        rows = rows_of(self.tensor, self.part)
        return (Span(self.tensor.span.file, rows.start, rows.start + (rows.count - 1) * rows.stride + rows.row_bytes),)


class BufferSpec(NamedTuple):
    """Memory to take: `num_bytes` on `device`, for tensors of `file`; or that file's own pages, mapped."""

    device: str
    file: str
    num_bytes: int
    is_map: bool = False


class BufferSlot(NamedTuple):
    """Position of a tensor in memory: byte `start` of the buffer with index `buffer` in `Schedule.buffers`."""

    wanted: RequestedTensor
    buffer: int
    start: int


class DTypeCast(NamedTuple):
    """From the dtype in the file to the one in memory."""

    stored: DType
    wanted: DType


class Spread(NamedTuple):
    """Distances in memory, in elements: from one of a row to the next, and from row to row. `bits` are of the file."""

    bits: int
    step: int
    row_stride: int


class Destination(NamedTuple):
    """Part of a read with its target: `rows` times `row_bytes`, `stride` apart, the first at byte `source` of the read.

    They are written from byte `start` of a buffer on, without gaps or as `spread` says, converted by `cast` if there is
    one.
    """

    source: int
    row_bytes: int
    buffer: int
    start: int
    rows: int = 1
    stride: int = 0
    cast: DTypeCast | None = None
    spread: Spread | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, without those between the rows."""
        return self.rows * self.row_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory, without what a spread leaves between them."""
        return self._in_memory(self.num_bytes)

    def start_of_row(self, row: int) -> int:
        """Return the byte of the buffer at which row `row` begins."""
        if self.spread is None:
            return self.start + self._in_memory(row * self.row_bytes)
        return self.start + self._in_memory(row * self.spread.row_stride * self.spread.bits // 8)

    def start_after(self, num_bytes: int) -> int:
        """Return the byte of the buffer at which what comes after the first `num_bytes` of a single row begins."""
        return self.start + self._in_memory(num_bytes * (1 if self.spread is None else self.spread.step))

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are written as they are, one after the other."""
        return self.rows == 1 and self.cast is None and self.spread is None

    def _in_memory(self, num_bytes: int) -> int:
        return num_bytes if self.cast is None else num_bytes * self.cast.wanted.bits // self.cast.stored.bits


class Delivery(Enum):
    """Path of the bytes of a read to their buffers."""

    STRAIGHT = "read into them"
    SCATTERED = "read into them, and the gaps between them into scratch memory"
    STAGED = "read into a block, and copied or cast from there"
    POPULATED = "made present in the map of the file, where they stay"


class ReadJob(NamedTuple):
    """One read: `num_bytes` of `file` from `offset` on, all for one device."""

    file: str
    offset: int
    num_bytes: int
    destinations: tuple[Destination, ...]
    delivery: Delivery = Delivery.STRAIGHT
    device: str = CPU


class Schedule(NamedTuple):
    """Memory to take, where each tensor will lie in it, and the reads that fill it, in order."""

    buffers: tuple[BufferSpec, ...]
    slots: Mapping[str, BufferSlot]
    jobs: tuple[ReadJob, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(job.num_bytes for job in self.jobs)

    def bytes_on(self, device: str) -> int:
        """Return the bytes of memory to take on `device`; pages of files are not counted."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.device == device and not buffer.is_map)


def schedule_reads(
    wanted: Iterable[RequestedTensor],
    *,
    block_bytes: int = BLOCK_BYTES,
    in_map: bool = False,
    populate: bool = True,
    ends_with_tensors: bool = False,
) -> Schedule:
    """Return the reads that bring `wanted` into memory: by file and offset, neighbours merged, cut into blocks.

    Tensors that lie in the same bytes (tied weights) and are wanted alike share their memory. Those whose bytes
    overlap otherwise, views of one storage in a torch file, do not.

    Args:
        wanted: At most once per name.
        block_bytes: The size of a read; the first of a row of them is as much smaller as has it end at a page. One
            gathered row, or one element that is cast, may be larger.
        in_map: Leave in the pages of the file what can stay there: whole tensors and rows, as they are stored, for the
            CPU. The slots are then offsets into the file.
        populate: Make those pages present before the load ends; otherwise each is read when it is first touched.
        ends_with_tensors: A read is of whole tensors, or of a part of a single one.

    Example: 1-byte tensors of 10, 6 and 40 elements at offsets 100, 110 and 200 of one file, blocks of 32: a read of 16
    bytes at 100 to two destinations, one of 32 at 200 and one of 8 at 232; the tensors start at 0, 64 and 128 of one
    buffer.
    """
    layout = _BufferLayout()
    requests: dict[str, list[ReadRequest]] = {}
    is_assembled = False
    for want in sorted(wanted, key=_position):
        stays = in_map and can_stay_in_map(want)
        if layout.add(want, in_map=stays) and want.num_bytes and (populate or not stays):
            is_assembled |= isinstance(want.tensor, AssembledTensor)
            for file, request in _requests_of(want, layout.slots[want.name], stays=stays):
                requests.setdefault(file, []).append(request)
    if is_assembled:  # else they are in order
        requests = {file: sorted(requests[file], key=lambda request: request.offset) for file in sorted(requests)}
    jobs = [
        job
        for file, members in requests.items()
        for job in jobs_of(file, members, block_bytes, ends_with_requests=ends_with_tensors)
    ]
    return Schedule(buffers=layout.buffers(), slots=layout.slots, jobs=tuple(jobs))


def _position(want: RequestedTensor) -> tuple[str, int, str]:
    first = want.spans[0]
    return first.file, first.start, want.name


def can_stay_in_map(want: RequestedTensor) -> bool:
    """Return whether `want` is bytes of its file as they are there, in the CPU's memory."""
    if isinstance(want.tensor, AssembledTensor) or want.device != CPU or want.is_cast:
        return False
    is_in_one_piece = want.part is None or rows_of(want.tensor, want.part).count == 1
    return is_in_one_piece and want.spans[0].start % max(want.dtype.bits // 8, 1) == 0


class _BufferLayout:
    """Assigns every requested tensor a slot in a buffer."""

    def __init__(self) -> None:
        self.slots: dict[str, BufferSlot] = {}
        self._numbers: dict[tuple[str, str, bool, str], int] = {}
        self._sizes: list[int] = []
        self._shared: dict[tuple[object, ...], BufferSlot] = {}

    def add(self, want: RequestedTensor, *, in_map: bool) -> bool:
        """Give `want` a slot; return whether its bytes have to be read: not if another one has the same."""
        stored = want.tensor.pieces if isinstance(want.tensor, AssembledTensor) else want.tensor.span
        same = (stored, want.tensor.dtype.name, want.part, want.dtype.name, want.device)
        num_bytes, span = want.num_bytes, want.spans[0]
        twin = self._shared.get(same)
        if twin is not None and num_bytes:
            self.slots[want.name] = BufferSlot(want, twin.buffer, twin.start)
            return False
        key = (span.file, want.device, in_map, "" if want.device == CPU else want.name)
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._sizes):
            self._sizes.append(0 if in_map or want.device != CPU else _first_start(span))
        if in_map:
            start = span.start
            self._sizes[number] = max(self._sizes[number], span.stop)
        else:
            start = self._sizes[number]
            self._sizes[number] += num_bytes if want.device != CPU else -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.slots[want.name] = self._shared[same] = BufferSlot(want, number, start)
        return True

    def buffers(self) -> tuple[BufferSpec, ...]:
        return tuple(
            BufferSpec(device, file, num_bytes, is_map)
            for (file, device, is_map, _), num_bytes in zip(self._numbers, self._sizes, strict=True)
        )


def _first_start(span: Span) -> int:
    """Return where the first tensor of a file begins in its buffer: as far into a page as in the file, if aligned.

    Most tensors are a multiple of 64 bytes long, so those after it lie like it, and direct reads can go in place.
    """
    into_page = span.start % _PAGE_BYTES
    return into_page if into_page % ALIGNMENT == 0 else 0


@dataclass(slots=True)
class ReadRequest:
    """Bytes of a file that are delivered alike, and may be cut between rows, or between units of a single row."""

    offset: int
    destination: Destination
    delivery: Delivery
    device: str
    unit: int

    @property
    def num_bytes(self) -> int:
        """Bytes from the first to the last, those between the rows included."""
        return (self.destination.rows - 1) * self.destination.stride + self.destination.row_bytes

    @property
    def least_bytes(self) -> int:
        """The smallest part that can be cut off."""
        return self.unit if self.destination.rows == 1 else self.destination.row_bytes

    def join(self, other: ReadRequest) -> bool:
        """Take `other` in if it goes on where this one ends, in the file and in the buffer; return whether it does."""
        to, then = self.destination, other.destination
        is_next = other.offset == self.offset + to.row_bytes and then.start == to.start + to.row_bytes
        is_alike = (other.delivery, other.device, then.buffer) == (self.delivery, self.device, to.buffer)
        if not (is_next and is_alike and to.is_plain and then.is_plain):
            return False
        self.destination = to._replace(row_bytes=to.row_bytes + then.row_bytes)
        return True

    def cut(self, room: int) -> tuple[ReadRequest, ReadRequest | None]:
        """Return as much as fits into `room` bytes, but at least the smallest part, and the rest."""
        to = self.destination
        if self.num_bytes <= room:
            return self, None
        if to.rows == 1:
            step = max(room // self.unit, 1) * self.unit
            if step >= to.row_bytes:
                return self, None
            head = to._replace(row_bytes=step)
            tail = to._replace(row_bytes=to.row_bytes - step, start=to.start_after(step))
        else:
            rows = max((room - to.row_bytes) // to.stride + 1, 1)
            step = rows * to.stride
            head = to._replace(rows=rows, stride=to.stride if rows > 1 else 0)
            more = to.rows - rows
            tail = to._replace(rows=more, stride=to.stride if more > 1 else 0, start=to.start_of_row(rows))
        rest = ReadRequest(self.offset + step, tail, self.delivery, self.device, self.unit)
        return ReadRequest(self.offset, head, self.delivery, self.device, self.unit), rest


def _requests_of(want: RequestedTensor, slot: BufferSlot, *, stays: bool) -> Iterator[tuple[str, ReadRequest]]:
    """Yield what brings `want` to its slot, each with the file that it is for."""
    cast = DTypeCast(want.tensor.dtype, want.dtype) if want.is_cast else None
    straight = Delivery.POPULATED if stays else Delivery.STRAIGHT
    delivery = straight if cast is None and want.device == CPU else Delivery.STAGED
    if isinstance(want.tensor, AssembledTensor):
        yield from _requests_of_pieces(want.tensor, want, slot, cast, delivery)
        return
    rows = rows_of(want.tensor, want.part)
    for request in requests_for(rows, slot.buffer, slot.start, cast=cast, delivery=delivery, device=want.device):
        if request.destination.rows > 1:
            request.delivery = Delivery.STAGED
        yield want.tensor.span.file, request


def _requests_of_pieces(
    tensor: AssembledTensor, want: RequestedTensor, slot: BufferSlot, cast: DTypeCast | None, delivery: Delivery
) -> Iterator[tuple[str, ReadRequest]]:
    for copy in strided_copies(tensor):
        for request in requests_of_copy(
            copy, tensor.dtype, slot.buffer, slot.start, cast=cast, delivery=delivery, device=want.device
        ):
            if request.destination.rows > 1:
                request.delivery = Delivery.STAGED
            yield copy.file, request


def requests_of_copy(
    copy: StridedCopy,
    dtype: DType,
    buffer: int,
    start: int,
    *,
    cast: DTypeCast | None = None,
    delivery: Delivery = Delivery.SCATTERED,
    device: str = CPU,
) -> Iterator[ReadRequest]:
    """Yield what delivers `copy`, of elements of `dtype`, to its places in the part at byte `start` of a buffer."""
    width = dtype.alignment
    rows = StridedRange(copy.start, copy.run_bytes, copy.count, copy.stride)
    is_dense = copy.target_step == 1 and (copy.count == 1 or copy.target_stride * width == copy.run_bytes)
    spread = None if is_dense else Spread(8 * width, copy.target_step, copy.target_stride)
    at = start + copy.target * (width if cast is None else cast.wanted.alignment)
    for request in requests_for(rows, buffer, at, cast=cast, delivery=delivery, device=device, spread=spread):
        if request.destination.spread is not None:
            request.delivery = Delivery.STAGED
        yield request


def gathers(rows: StridedRange) -> bool:
    """Return whether `rows` are read together, with the bytes between them."""
    gap = rows.stride - rows.row_bytes
    return rows.count > 1 and gap <= MAX_GAP_BYTES and rows.stride <= MAX_GATHERED_ROW_BYTES


def requests_for(
    rows: StridedRange,
    buffer: int,
    start: int,
    *,
    cast: DTypeCast | None = None,
    delivery: Delivery = Delivery.SCATTERED,
    device: str = CPU,
    spread: Spread | None = None,
) -> Iterator[ReadRequest]:
    """Yield what delivers `rows` to byte `start` of a buffer and on: all rows as one request, or each by itself."""
    bits = cast.stored.bits if cast is not None else spread.bits if spread is not None else 8
    unit = max(bits // 8, 1)
    whole = Destination(
        0, rows.row_bytes, buffer, start, rows.count, rows.stride if rows.count > 1 else 0, cast, spread
    )
    if rows.count == 1 or gathers(rows):
        yield ReadRequest(rows.start, whole, delivery, device, unit)
        return
    # A row by itself needs no spread, unless there are gaps between its elements too.
    within = spread if spread is not None and spread.step > 1 else None
    for row in range(rows.count):
        single = Destination(0, rows.row_bytes, buffer, whole.start_of_row(row), cast=cast, spread=within)
        yield ReadRequest(rows.start + row * rows.stride, single, delivery, device, unit)


@dataclass(slots=True)
class _OpenJob:
    """A job that neighbours may still join."""

    file: str
    offset: int
    delivery: Delivery
    device: str
    num_bytes: int = 0
    destinations: list[Destination] = field(default_factory=list)

    def room(self, block_bytes: int) -> int:
        """Return the bytes of a full job: those of a read that is not staged end at a page of the file.

        Then the next begins at one, and a direct read of it needs no blocks around it.
        """
        is_aligned = self.delivery is Delivery.STRAIGHT and block_bytes > _PAGE_BYTES
        return block_bytes - (self.offset % _PAGE_BYTES if is_aligned else 0)

    def takes(self, request: ReadRequest, block_bytes: int) -> bool:
        gap = request.offset - self.offset - self.num_bytes
        is_neighbour = 0 <= gap <= (MAX_GAP_BYTES if self.delivery is Delivery.SCATTERED else 0)
        is_alike = request.delivery is self.delivery and request.device == self.device
        if self.delivery is Delivery.SCATTERED and len(self.destinations) >= MAX_SCATTERED_PIECES:
            return False
        return (
            is_neighbour
            and is_alike
            and self.num_bytes + gap + min(request.least_bytes, block_bytes) <= self.room(block_bytes)
        )

    def add(self, request: ReadRequest) -> None:
        source = request.offset - self.offset
        self.destinations.append(request.destination._replace(source=source) if source else request.destination)
        self.num_bytes = source + request.num_bytes

    def closed(self) -> ReadJob:
        # Nothing has to be delivered of pages that stay where they are.
        destinations = () if self.delivery is Delivery.POPULATED else tuple(self.destinations)
        return ReadJob(self.file, self.offset, self.num_bytes, destinations, self.delivery, self.device)


def jobs_of(
    file: str, requests: Iterable[ReadRequest], block_bytes: int, *, ends_with_requests: bool = False
) -> Iterator[ReadJob]:
    """Yield the reads of `requests` of `file`, in their order: neighbours merged, cut into blocks.

    Each is of whole requests, or of a part of a single one, if it `ends_with_requests`.
    """
    job: _OpenJob | None = None
    is_cut = False
    for request in requests if ends_with_requests else _joined(requests):
        rest: ReadRequest | None = request
        is_staged_here = request.delivery is Delivery.STAGED and request.device == CPU
        size = min(block_bytes, STAGED_BLOCK_BYTES) if is_staged_here else block_bytes
        if job is not None and ends_with_requests and (is_cut or request.num_bytes > size - job.num_bytes):
            yield job.closed()
            job = None
        is_cut = request.num_bytes > size
        while rest is not None:
            if job is None or not job.takes(rest, size):
                if job is not None:
                    yield job.closed()
                job = _OpenJob(file, rest.offset, rest.delivery, rest.device)
            part, rest = rest.cut(job.room(size) - (rest.offset - job.offset))
            job.add(part)
    if job is not None:
        yield job.closed()


def _joined(requests: Iterable[ReadRequest]) -> Iterator[ReadRequest]:
    """Yield `requests`, those as one that go on where another ends: a copy of each would take longer."""
    joined: ReadRequest | None = None
    for request in requests:
        if joined is None or not joined.join(request):
            if joined is not None:
                yield joined
            joined = request
    if joined is not None:
        yield joined
