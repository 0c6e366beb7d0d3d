"""Requests for byte ranges, merged with their neighbours and cut into read jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bigload.dtypes import DType
from bigload.loading.scheduling.piece_copies import StridedCopy
from bigload.loading.scheduling.read_jobs import (
    CPU,
    Delivery,
    Destination,
    DTypeCast,
    ReadJob,
    Spread,
)
from bigload.loading.scheduling.slices import StridedRange
from bigload.units import KIB, MIB

STAGED_BLOCK_BYTES = 2 * MIB
"""Size of a read that is cast or gathered on the CPU: the bytes should still be in its cache when that happens."""

MAX_GAP_BYTES = 64 * KIB
"""Columns further apart are read one by one; others with the gaps between them, which cost less than a read each."""

MAX_GATHERED_ROW_BYTES = 256 * KIB
"""Columns of longer rows are read one by one too: a read of a whole row is long enough."""

MAX_SCATTERED_PIECES = 1024
"""In one read: about as many as one call of the system takes."""

PAGE_BYTES = 4 * KIB


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
        is_aligned = self.delivery is Delivery.STRAIGHT and block_bytes > PAGE_BYTES
        return block_bytes - (self.offset % PAGE_BYTES if is_aligned else 0)

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
