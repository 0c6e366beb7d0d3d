"""Bytes of files into local tensors.

What is one stretch of a file, or long ones, goes by the engine of `bigload.load`: rows of a matrix are. Columns are not
(`column_reading.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from bigload.checkpoint.model import Checkpoint, Span, TensorInfo
from bigload.dtypes import DTYPES, parse_dtype
from bigload.loading.buffers import filled
from bigload.loading.methods import Method
from bigload.loading.progress import ignore_progress
from bigload.loading.report import Recorder
from bigload.loading.schedule import (
    CPU,
    BufferSpec,
    Delivery,
    DTypeCast,
    ReadRequest,
    RequestedTensor,
    Schedule,
    jobs_of,
    requests_for,
)
from bigload.loading.slices import StridedRange
from bigload.loading.strategy.read_strategy import ReadStrategy, choose_strategy
from bigload.loading.strategy.settings import LoadSettings
from bigload.parallel.sharded_loading.byte_ranges import Lines, lines_of
from bigload.parallel.sharded_loading.column_reads import read_columns
from bigload.parallel.sharded_loading.local_tensors import LocalTensor
from bigload.units import KIB

MIN_STRETCH_BYTES = 256 * KIB
"""Runs of this length are reads of their own: the call is nothing beside the bytes."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Lines, and the local tensor that they are for: its position."""

    lines: Lines
    number: int


def fill_local(
    checkpoint: Checkpoint, chosen: LoadSettings, tensors: Sequence[LocalTensor]
) -> tuple[ReadStrategy, int]:
    """Read what `tensors` are to hold into their memory; return how, and how many bytes were asked of the files.

    Raises:
        ReadError: a file cannot be read to the end, or is not the one that was opened, or changed meanwhile.
        NotEnoughMemoryError: there is none for what is staged.
        UnsupportedMethodError: direct reads were asked for where there are none.
    """
    found = [
        _Line(lines, number)
        for number, each in enumerate(tensors)
        for lines in lines_of(each.part.stored, each.part.spans)
    ]
    rows = [line for line in found if _is_stretch(line.lines)]
    columns = [line for line in found if not _is_stretch(line.lines)]
    recorder = Recorder(is_tracing=False)
    strategy = choose_strategy(checkpoint, _wanted(rows, tensors), chosen, None, recorder)
    read_bytes = 0
    for group, way in _by_way(rows, tensors, strategy, checkpoint, chosen):
        read_bytes += _read_rows(checkpoint, group, tensors, way, recorder)
    pairs = [(line.lines, tensors[line.number]) for line in columns]
    read_bytes += read_columns(checkpoint, pairs, threads=strategy.threads)
    return strategy, read_bytes


def _is_stretch(lines: Lines) -> bool:
    return lines.target_step == 1 and (lines.count == 1 or lines.run_bytes >= MIN_STRETCH_BYTES)


def _by_way(
    rows: Sequence[_Line],
    tensors: Sequence[LocalTensor],
    strategy: ReadStrategy,
    checkpoint: Checkpoint,
    chosen: LoadSettings,
) -> Iterator[tuple[list[_Line], ReadStrategy]]:
    """Yield lines with how to read them: direct reads are for what no other process wants."""
    if strategy.method is not Method.DIRECT or chosen.method is Method.DIRECT:
        yield list(rows), strategy
        return
    own = [line for line in rows if not tensors[line.number].part.is_shared]
    shared = [line for line in rows if tensors[line.number].part.is_shared]
    yield own, strategy
    if shared:
        cached = replace(chosen, method=Method.READ)
        yield shared, choose_strategy(checkpoint, _wanted(shared, tensors), cached, None, Recorder(is_tracing=False))


def _wanted(rows: Sequence[_Line], tensors: Sequence[LocalTensor]) -> list[RequestedTensor]:
    """Return what is read as the loading engine knows it: byte ranges, or of elements that are cast."""
    return [
        RequestedTensor(
            tensor=_stretch(line.lines, line.lines.start + row * line.lines.stride, cast),
            dtype=cast.wanted,
            device=part.place,
        )
        for line in rows
        for part, cast in [(tensors[line.number].part, _cast(tensors[line.number]))]
        for row in range(line.lines.count)
    ]


def _stretch(lines: Lines, start: int, cast: DTypeCast) -> TensorInfo:
    span = Span(lines.file, start, start + lines.run_bytes)
    return TensorInfo("", cast.stored, (lines.run_bytes * 8 // cast.stored.bits,), span)


def _cast(tensor: LocalTensor) -> DTypeCast:
    """Return what the elements are and what they become; both bytes, where they stay as they are."""
    stored, wanted = tensor.part.stored.dtype, parse_dtype(str(tensor.part.dtype))
    return DTypeCast(DTYPES["U8"], DTYPES["U8"]) if stored == wanted else DTypeCast(stored, wanted)


def _read_rows(
    checkpoint: Checkpoint,
    rows: Sequence[_Line],
    tensors: Sequence[LocalTensor],
    strategy: ReadStrategy,
    recorder: Recorder,
) -> int:
    numbers = sorted({line.number for line in rows})
    position = {number: index for index, number in enumerate(numbers)}
    buffers = [
        BufferSpec(tensors[number].part.place, _file_of(tensors[number]), tensors[number].part.num_bytes)
        for number in numbers
    ]
    found = sorted(
        (
            (line.lines.file, request)
            for line in rows
            for request in _requests(line, tensors[line.number], position[line.number])
        ),
        key=lambda each: (each[0], each[1].offset),
    )
    jobs = [
        job
        for file, group in groupby(found, key=lambda each: each[0])
        for job in jobs_of(file, (request for _, request in group), strategy.block_bytes)
    ]
    schedule = Schedule(buffers=tuple(buffers), slots={}, jobs=tuple(jobs))
    filled(
        checkpoint, schedule, strategy, recorder, ignore_progress, memory=[tensors[number].memory for number in numbers]
    )
    return schedule.num_bytes


def _file_of(tensor: LocalTensor) -> str:
    return tensor.part.stored.pieces[0].tensor.span.file


def _requests(line: _Line, tensor: LocalTensor, buffer: int) -> Iterator[ReadRequest]:
    cast = _cast(tensor)
    is_cast = cast.stored != cast.wanted
    delivery = Delivery.STRAIGHT if tensor.part.place == CPU and not is_cast else Delivery.STAGED
    lines, width = line.lines, tensor.part.dtype.itemsize
    for row in range(lines.count):
        first = lines.start + row * lines.stride
        start = tensor.start + (lines.target + row * lines.target_stride) * width
        run = StridedRange(first, lines.run_bytes, 1, lines.run_bytes)
        yield from requests_for(
            run, buffer, start, cast=cast if is_cast else None, delivery=delivery, device=tensor.part.place
        )
