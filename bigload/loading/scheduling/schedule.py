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
from dataclasses import replace
from math import prod
from typing import NamedTuple

from bigload.checkpoint.model import AssembledTensor, Span, TensorInfo
from bigload.dtypes import DType
from bigload.loading.scheduling.piece_copies import strided_copies
from bigload.loading.scheduling.read_jobs import (
    ALIGNMENT,
    BLOCK_BYTES,
    CPU,
    Delivery,
    DTypeCast,
    ReadJob,
)
from bigload.loading.scheduling.read_requests import PAGE_BYTES, ReadRequest, jobs_of, requests_for, requests_of_copy
from bigload.loading.scheduling.slices import Slice, rows_of, sliced_shape


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
    into_page = span.start % PAGE_BYTES
    return into_page if into_page % ALIGNMENT == 0 else 0


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
