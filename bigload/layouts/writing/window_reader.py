"""Reader that fills windows of output files from the source files, with casts, slices and views.

A window may begin and end anywhere in a tensor: in the middle of a row of columns, between two elements of a cast. So
each request is a `Portion`: a byte range of the written form of one tensor. Reads are merged over all portions of a
window and go straight into the window. Bytes between wanted columns go to a scratch buffer in the same system call.
Only casts, computed tensors, views that are not stored row by row, and pieces of assembled tensors that have gaps
between their elements need torch.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from bigload.checkpoint.byte_source import ByteSource, expect_reads
from bigload.checkpoint.model import AssembledTensor, TensorInfo
from bigload.conversion.computed_tensor import ComputedTensor, Operand, OperandRows
from bigload.descriptors import MAX_BUFFERS
from bigload.dtypes import DTYPES
from bigload.extras import require
from bigload.layouts.output import OutputTensor
from bigload.layouts.writing.source_files import SourceFiles
from bigload.loading.readers.direct import CacheFirstReader
from bigload.loading.scheduling.piece_copies import strided_copies
from bigload.loading.scheduling.read_jobs import BLOCK_BYTES, Delivery, DTypeCast, ReadJob
from bigload.loading.scheduling.read_requests import ReadRequest, jobs_of, requests_for, requests_of_copy
from bigload.loading.scheduling.slices import StridedRange, rows_between, source_rows
from bigload.loading.scheduling.strided_views import boxes_between, view_parts
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.activities import NO_RECORDER
from bigload.units import MIB

if TYPE_CHECKING:
    from bigload.loading.staging.cpu_stager import HostStager
    from bigload.loading.staging.row_computer import RowComputer

_LEAST_SCATTERED_BYTES = 256
"""Shorter rows are copied from a block: the system takes longer for one than a copy does."""

_MAX_FETCHED_BYTES = 8 * MIB
"""What is kept of a remote source for a window that is computed, in each thread."""

_ARRANGED_BYTES = 8 * MIB
"""Bytes of a view that are put in order at once: the more, the longer are the ranges to read."""


@dataclass(frozen=True, slots=True)
class Portion:
    """Bytes `start` to `stop` of what is written of `tensor`, wanted at byte `at` of the memory to fill.

    No element is cut through where the tensor is cast, assembled, computed, or not stored row by row.
    """

    tensor: OutputTensor
    start: int
    stop: int
    at: int

    @property
    def is_read_straight(self) -> bool:
        """Whether the tensor is stored row by row, or in pieces that are."""
        return not (self.tensor.is_view or self.tensor.is_computed)


def jobs_for(portions: Sequence[Portion]) -> Iterator[ReadJob]:
    """Yield the reads that bring `portions` where they are wanted, except of views and computed tensors.

    Neighbours are merged. Buffer `i` of their destinations is the memory of `portions[i]`, and begins at its `at`.
    What is cast or spread in memory is `STAGED`, in blocks that stay in a cache; all else is `SCATTERED`.
    """
    numbered = ((number, portion) for number, portion in enumerate(portions) if portion.is_read_straight)
    requests = (request for number, portion in numbered for request in _requests_of(portion, number))
    for file, members in groupby(requests, key=itemgetter(0)):
        yield from jobs_of(file, (request for _, request in members), BLOCK_BYTES)


def first_read(portions: Sequence[Portion]) -> tuple[str, int]:
    """Return the file and the offset of the first read for `portions`; nowhere if there is none."""
    for job in jobs_for(portions[:1]):
        return job.file, job.offset
    return "", 0


def _requests_of(portion: Portion, buffer: int) -> Iterator[tuple[str, ReadRequest]]:
    """Yield what to read, and of which file."""
    tensor = portion.tensor
    assert not isinstance(tensor.source, ComputedTensor)
    cast = DTypeCast(tensor.source.dtype, tensor.dtype) if tensor.is_cast else None
    delivery = Delivery.STAGED if cast is not None else Delivery.SCATTERED
    if isinstance(tensor.source, AssembledTensor):
        yield from _requests_of_pieces(tensor.source, portion, buffer, cast, delivery)
        return
    stored, wanted = tensor.source.dtype, tensor.dtype
    start, stop = (edge * stored.bits // wanted.bits for edge in (portion.start, portion.stop))
    filled = 0
    for rows in _joined(rows_between(tensor.source, tensor.parts, start, stop)):
        at = filled * wanted.bits // stored.bits
        for request in requests_for(rows, buffer, at, cast=cast, delivery=delivery):
            yield tensor.source.span.file, request
        filled += rows.num_bytes


def _requests_of_pieces(
    source: AssembledTensor, portion: Portion, buffer: int, cast: DTypeCast | None, delivery: Delivery
) -> list[tuple[str, ReadRequest]]:
    written = portion.tensor.dtype.alignment
    first, last = portion.start // written, portion.stop // written
    found = []
    for box, number in boxes_between(source.shape, first, last):
        for copy in strided_copies(source, tuple((edges,) for edges in box)):
            at = (number - first) * written
            for request in requests_of_copy(copy, source.dtype, buffer, at, cast=cast, delivery=delivery):
                if request.destination.rows > 1 and request.destination.row_bytes < _LEAST_SCATTERED_BYTES:
                    request.delivery = Delivery.STAGED
                found.append((copy.file, request))
    # Pieces that take turns in memory are often neighbours in the file.
    return sorted(found, key=lambda each: (each[0], each[1].offset))


def _joined(several: Iterable[StridedRange]) -> Iterator[StridedRange]:
    """Merge single rows that are adjacent in the file."""
    last: StridedRange | None = None
    for rows in several:
        if last is not None and last.count == rows.count == 1 and last.start + last.num_bytes == rows.start:
            num_bytes = last.num_bytes + rows.num_bytes
            last = StridedRange(last.start, num_bytes, 1, num_bytes)
            continue
        if last is not None:
            yield last
        last = rows
    if last is not None:
        yield last


def _read_for(portion: Portion) -> Iterator[Portion]:
    """Yield what is read to fill `portion`: itself, or what it is computed from, but for what stays in memory."""
    source = portion.tensor.source
    if not isinstance(source, ComputedTensor):
        yield portion
        return
    tensor = portion.tensor
    row_bytes = tensor.dtype.num_bytes(max(tensor.shape[-1] if tensor.shape else 1, 1))
    first, last = portion.start // row_bytes, -(-portion.stop // row_bytes)
    for _, start, stop in source_rows(source.shape, tensor.parts, first, last):
        for rows in source.operation.rows_for(*source.whole_rows(start, stop)):
            if not rows.is_recent:
                yield from _read_for(_portion_of(rows))


def _portion_of(rows: OperandRows) -> Portion:
    return Portion(_as_stored(rows.tensor), rows.start * rows.row_bytes, rows.stop * rows.row_bytes, 0)


def _as_stored(tensor: Operand) -> OutputTensor:
    """Return `tensor` to be read as it is; as bytes where it is stored row by row, which suits every dtype."""
    if isinstance(tensor, TensorInfo) and tensor.strides is None:
        tensor = replace(tensor, dtype=DTYPES["U8"], shape=(tensor.num_bytes,))
    return OutputTensor(source=tensor, dtype=tensor.dtype)


class WindowReader:
    """Reader of portions of tensors from `sources` by file; several threads may share one.

    It allocates two blocks of 2 MiB for each thread that casts, and one of 16 MiB for each that puts views in
    order; otherwise next to none.

    Rows of which only some columns are wanted are read through the page cache: another rank's file needs the others.
    """

    def __init__(self, sources: SourceFiles) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        self._stager: HostStager | None = None
        self._row_computer: RowComputer | None = None
        self._overflows: Counter[str] = Counter()
        self._thread = threading.local()  # `keeps_recent`: see `expect`

    def expect(self, windows: Iterable[Sequence[Portion]], *, keeps_recent: bool) -> None:
        """Have the calling thread read these windows of remote sources by few requests.

        With `keeps_recent`, bytes between the columns of one window are kept for the next.
        """
        self._thread.keeps_recent = keeps_recent
        ranges: dict[str, list[tuple[int, int]]] = {}
        for portions in windows:
            for job in self._jobs([read for portion in portions for read in _read_for(portion)]):
                ranges.setdefault(job.file, []).append((job.offset, job.offset + job.num_bytes))
        for file, pairs in ranges.items():
            with self._sources.keeping_recent(file) if keeps_recent else self._sources.past_cache(file) as source:
                expect_reads(source, pairs)

    @property
    def overflows(self) -> Mapping[str, int]:
        """Numbers of finite values beyond the largest of the new dtype, by tensor; tensors without any are left out.

        They became infinite, or no number, or that largest value.
        """
        with self._lock:
            return dict(self._overflows)

    def fill(self, view: memoryview, portions: Sequence[Portion]) -> None:
        """Fill `view`, writable bytes, with `portions`; what lies between them stays as it is."""
        views = [view[portion.at : portion.at + portion.stop - portion.start] for portion in portions]
        jobs = self._jobs(portions)
        if not all(each.is_read_straight for each in portions) or any(
            each.delivery is Delivery.STAGED for each in jobs
        ):
            self._compute(views, portions, jobs)
            return
        for job in jobs:
            with self._source(job) as source:
                _scatter(job, views, source)

    @contextmanager
    def viewed(self, portion: Portion) -> Iterator[memoryview]:
        """Lend the bytes of `portion`, or the first of them, not to be written to.

        Those of a local file that has them as wanted are not copied: all of them lie in the page cache, or as many as
        fit in a block of the pool of `SourceFiles`.
        """
        stored = portion.tensor.source
        is_as_stored = portion.is_read_straight and not (portion.tensor.is_cast or portion.tensor.parts)
        if isinstance(stored, TensorInfo) and is_as_stored:
            with self._sources.past_cache(stored.span.file) as source:
                if isinstance(source, CacheFirstReader):
                    with source.viewed(stored.span.start + portion.start, stored.span.start + portion.stop) as view:
                        yield view
                    return
        num_bytes = portion.stop - portion.start
        memory = memoryview(allocate(num_bytes))[:num_bytes]
        self.fill(memory, [portion])
        yield memory

    def _jobs(self, portions: Sequence[Portion]) -> list[ReadJob]:
        jobs = list(jobs_for(portions))
        if hasattr(self._thread, "keeps_recent"):  # bytes of a response come in the order of the file
            jobs.sort(key=lambda job: (job.file, job.offset))
        return jobs

    def _source(self, job: ReadJob) -> AbstractContextManager[ByteSource]:
        if getattr(self._thread, "keeps_recent", False):
            return self._sources.keeping_recent(job.file)
        has_gaps = sum(each.num_bytes for each in job.destinations) < job.num_bytes
        return self._sources.through_cache(job.file) if has_gaps else self._sources.past_cache(job.file)

    def _compute(self, views: Sequence[memoryview], portions: Sequence[Portion], jobs: Sequence[ReadJob]) -> None:
        """Fill a window in which something is computed, which takes torch."""
        require("torch", asked_by="computing tensors while resharding", extra="torch")
        from bigload.loading.staging.cpu_stager import HostStager

        with self._lock:
            stager = self._stager = self._stager or HostStager([], NO_RECORDER)
        beyond = [0] * len(views)
        for job in jobs:
            with self._source(job) as source:
                if job.delivery is Delivery.STAGED:
                    stager.deliver_to(views, job, source, beyond=beyond)
                else:
                    _scatter(job, views, source)
        for number, portion in enumerate(portions):
            tensor, view = portion.tensor, views[number]
            if isinstance(tensor.source, ComputedTensor):
                self._thread.fetched = self._fetched(portion)
                beyond[number] += self._computer.compute(
                    tensor.source, portion.start, portion.stop, view, parts=tensor.parts, dtype=tensor.dtype
                )
                self._thread.fetched = []
            elif isinstance(tensor.source, TensorInfo) and tensor.is_view:
                beyond[number] += self._arrange(portion, tensor.source, view, stager)
        with self._lock:
            for portion, count in zip(portions, beyond, strict=True):
                if count:
                    self._overflows[portion.tensor.name] += count

    def _fetched(self, portion: Portion) -> list[tuple[Portion, memoryview]]:
        """Return what `portion` is computed from, read in the order of the files, if they are remote.

        Operands that take turns, such as numbers and their scales, would each want a response that runs over the other.
        """
        if not hasattr(self._thread, "keeps_recent"):
            return []
        reads = [each for each in _read_for(portion) if isinstance(each.tensor.source, TensorInfo)]
        if len(reads) < 2 or sum(each.stop - each.start for each in reads) > _MAX_FETCHED_BYTES:
            return []
        views = [memoryview(bytearray(each.stop - each.start)) for each in reads]
        for job in self._jobs(reads):
            with self._source(job) as source:
                _scatter(job, views, source)
        return list(zip(reads, views, strict=True))

    @property
    def _computer(self) -> RowComputer:
        from bigload.loading.staging.row_computer import RowComputer

        def fill(view: memoryview, tensor: TensorInfo | AssembledTensor, start: int, stop: int) -> None:
            if isinstance(tensor, TensorInfo) and tensor.strides is None and not hasattr(self._thread, "keeps_recent"):
                with self._sources.past_cache(tensor.span.file) as source:
                    source.read_into([view], tensor.span.start + start)
                return
            wanted = Portion(_as_stored(tensor), start, stop, 0)
            for portion, found in getattr(self._thread, "fetched", ()):
                if portion.tensor == wanted.tensor and portion.start <= start and stop <= portion.stop:
                    view[:] = found[start - portion.start : stop - portion.start]
                    return
            self.fill(view, [wanted])

        with self._lock:
            self._row_computer = self._row_computer or RowComputer(fill)
            return self._row_computer

    def _arrange(self, portion: Portion, stored: TensorInfo, view: memoryview, stager: HostStager) -> int:
        tensor = portion.tensor
        cast = DTypeCast(stored.dtype, tensor.dtype)
        stored_bytes, wanted_bytes = cast.stored.alignment, cast.wanted.alignment
        beyond, step = 0, _ARRANGED_BYTES // stored_bytes
        first, last = portion.start // wanted_bytes, portion.stop // wanted_bytes
        with self._sources.past_cache(stored.span.file) as source:
            for start in range(first, last, step):
                memory = view[(start - first) * wanted_bytes :]
                for piece in view_parts(stored, tensor.parts, start, min(start + step, last)):
                    beyond += stager.arrange(piece, memory, cast, partial(_read_rows, piece.rows, source))
        return beyond


def _read_rows(several: Iterable[StridedRange], source: ByteSource, view: memoryview) -> None:
    """Read rows, one after the other, into `view`."""
    for job in jobs_of("", _one_after_the_other(several), BLOCK_BYTES):
        _scatter(job, [view], source)


def _one_after_the_other(several: Iterable[StridedRange]) -> Iterator[ReadRequest]:
    filled = 0
    for rows in several:
        yield from requests_for(rows, 0, filled)
        filled += rows.num_bytes


def _scatter(job: ReadJob, views: Sequence[memoryview], source: ByteSource) -> None:
    """Read `job` into its destinations, and what lies between them into one scratch buffer."""
    scratch = memoryview(bytearray(_widest_gap(job)))
    buffers: list[memoryview] = []
    begin = end = 0
    for destination in job.destinations:
        view, length = views[destination.buffer], destination.row_bytes
        for row in range(destination.rows):
            start, at = destination.source + row * destination.stride, destination.start + row * length
            if start > end:
                buffers.append(scratch[: start - end])
            buffers.append(view[at : at + length])
            end = start + length
            if len(buffers) > MAX_BUFFERS - 2:  # as many as one call of the system takes
                source.read_into(buffers, job.offset + begin)
                buffers, begin = [], end
    if buffers:
        source.read_into(buffers, job.offset + begin)


def _widest_gap(job: ReadJob) -> int:
    widest = end = 0
    for destination in job.destinations:
        widest = max(widest, destination.source - end, destination.stride - destination.row_bytes)
        end = destination.source + (destination.rows - 1) * destination.stride + destination.row_bytes
    return widest
