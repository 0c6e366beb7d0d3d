"""Reads of files into local tensors: contiguous or long ranges, such as rows, by the engine of `bigload.load`.

Short ranges, such as columns, are read by `column_reads.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.dtypes import DTYPES, parse_dtype
from bigload.loading.buffers import fill_buffers
from bigload.loading.progress import ignore_progress
from bigload.loading.scheduling.piece_copies import StridedCopy, strided_copies
from bigload.loading.scheduling.read_jobs import CPU, Delivery, DTypeCast
from bigload.loading.scheduling.read_requests import ReadRequest, jobs_of, requests_for
from bigload.loading.scheduling.schedule import BufferSpec, RequestedTensor, Schedule
from bigload.loading.scheduling.slices import StridedRange
from bigload.loading.settings import LoadSettings, Method
from bigload.loading.strategy.read_strategy import PARALLEL_BYTES, ReadStrategy, choose_strategy, usual_threads
from bigload.machine.threads.activities import Recorder
from bigload.parallel.sharded_loading.column_reads import read_columns
from bigload.parallel.sharded_loading.local_tensors import LocalTensor
from bigload.units import KIB

MIN_RANGE_BYTES = 256 * KIB
"""The least length of one of several ranges for a read of its own: the call is nothing beside the bytes."""

_Copies = Sequence[tuple[StridedCopy, LocalTensor]]


def fill_local(
    checkpoint: Checkpoint, settings: LoadSettings, tensors: Sequence[LocalTensor]
) -> tuple[ReadStrategy, int]:
    """Read the parts of `tensors` into their memory; return the strategy, and the bytes asked of files."""
    copies = [(copy, tensor) for tensor in tensors for copy in strided_copies(tensor.part.stored, tensor.part.spec)]
    rows = [each for each in copies if _is_read_by_engine(each[0])]
    columns = [each for each in copies if not _is_read_by_engine(each[0])]
    recorder = Recorder(is_tracing=False)
    strategy = choose_strategy(checkpoint, _requested(rows), settings, None, recorder)
    if strategy.method is Method.DIRECT and settings.method is not Method.DIRECT:
        own = [each for each in rows if not each[1].part.is_shared]
        shared = [each for each in rows if each[1].part.is_shared]
    else:
        own, shared = rows, []
    read_bytes = _read_rows(checkpoint, own, strategy, recorder)
    if shared:  # what other processes read too goes through the page cache, which reads it once
        cached = settings._replace(method=Method.READ)
        shared_strategy = choose_strategy(checkpoint, _requested(shared), cached, None, Recorder(is_tracing=False))
        read_bytes += _read_rows(checkpoint, shared, shared_strategy, recorder)
    read_bytes += read_columns(checkpoint, columns, threads=_column_threads(columns, strategy, settings))
    return strategy, read_bytes


def _column_threads(columns: _Copies, strategy: ReadStrategy, settings: LoadSettings) -> int:
    """Return the threads for columns: the strategy may be that of a few rows, which one thread reads."""
    if settings.threads is not None or sum(copy.num_bytes for copy, _ in columns) < PARALLEL_BYTES:
        return strategy.threads
    return max(strategy.threads, usual_threads(settings.share, is_cast=False))


def _is_read_by_engine(copy: StridedCopy) -> bool:
    return copy.target_step == 1 and (copy.count == 1 or copy.run_bytes >= MIN_RANGE_BYTES)


def _requested(rows: _Copies) -> list[RequestedTensor]:
    """Return each range as a tensor for the loading engine: of bytes, or of elements if they are cast."""
    return [
        RequestedTensor(
            tensor=TensorInfo(
                "",
                cast.stored,
                (copy.run_bytes * 8 // cast.stored.bits,),
                Span(copy.file, start, start + copy.run_bytes),
            ),
            dtype=cast.wanted,
            device=tensor.part.device_name,
        )
        for copy, tensor in rows
        for cast in [_cast(tensor)]
        for start in (copy.start + row * copy.stride for row in range(copy.count))
    ]


def _cast(tensor: LocalTensor) -> DTypeCast:
    """Return the cast of the elements; between bytes if their dtype stays."""
    stored, wanted = tensor.part.stored.dtype, parse_dtype(str(tensor.part.dtype))
    return DTypeCast(DTYPES["U8"], DTYPES["U8"]) if stored == wanted else DTypeCast(stored, wanted)


def _read_rows(checkpoint: Checkpoint, rows: _Copies, strategy: ReadStrategy, recorder: Recorder) -> int:
    tensors = list({id(tensor): tensor for _, tensor in rows}.values())
    buffer_of = {id(tensor): index for index, tensor in enumerate(tensors)}
    requests = sorted(
        ((copy.file, request) for copy, tensor in rows for request in _requests(copy, tensor, buffer_of[id(tensor)])),
        key=lambda each: (each[0], each[1].offset),
    )
    jobs = [
        job
        for file, group in groupby(requests, key=lambda each: each[0])
        for job in jobs_of(file, (request for _, request in group), strategy.block_bytes)
    ]
    buffers = tuple(
        BufferSpec(tensor.part.device_name, tensor.part.stored.pieces[0].tensor.span.file, tensor.part.num_bytes)
        for tensor in tensors
    )
    schedule = Schedule(buffers=buffers, slots={}, jobs=tuple(jobs))
    memory = [tensor.memory for tensor in tensors]
    fill_buffers(checkpoint, schedule, strategy, recorder, ignore_progress, memory=memory)
    return schedule.num_bytes


def _requests(copy: StridedCopy, tensor: LocalTensor, buffer: int) -> Iterator[ReadRequest]:
    cast = _cast(tensor)
    is_cast = cast.stored != cast.wanted
    delivery = Delivery.STRAIGHT if tensor.part.device_name == CPU and not is_cast else Delivery.STAGED
    width = tensor.part.dtype.itemsize
    for row in range(copy.count):
        source = StridedRange(copy.start + row * copy.stride, copy.run_bytes, 1, copy.run_bytes)
        start = tensor.start + (copy.target + row * copy.target_stride) * width
        yield from requests_for(
            source, buffer, start, cast=cast if is_cast else None, delivery=delivery, device=tensor.part.device_name
        )
