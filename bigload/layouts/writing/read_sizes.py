"""Bytes of source files that are read to write output files, for the progress of transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from bigload.checkpoint.model import AssembledTensor, TensorInfo, sizes_of
from bigload.conversion.computed_tensor import ComputedTensor
from bigload.layouts.output import OutputFile, OutputTensor
from bigload.loading.scheduling.read_requests import gathers
from bigload.loading.scheduling.slices import StridedRange, rows_of


def bytes_to_read(files: Iterable[OutputFile], stored: Mapping[str, TensorInfo]) -> int:
    """Return how many bytes are read for `files`, of the tensors `stored`; what several files share is read once."""
    wanted: Counter[tuple[str, str]] = Counter()
    sizes: dict[tuple[str, str], int] = {}
    known = sizes_of(stored)
    for output in files:
        for tensor in output.tensors:
            for source, num_bytes in _reads(tensor):
                key = source.span.file, source.name
                wanted[key] += num_bytes
                sizes[key] = known.get(source.name, source.span.num_bytes)
    return sum(min(num_bytes, sizes[key]) for key, num_bytes in wanted.items())


def _reads(tensor: OutputTensor) -> Iterator[tuple[TensorInfo, int]]:
    """Yield the stored tensors, or pieces of them, and the bytes to read of each."""
    source = tensor.source
    if isinstance(source, AssembledTensor):
        for piece in source.pieces:
            yield piece.tensor, _read_bytes(_rows_of_piece(piece.tensor))
    elif isinstance(source, ComputedTensor):
        yield from ((stored, stored.span.num_bytes) for stored in source.stored_operands)
    elif source.strides is not None:
        yield source, source.span.num_bytes
    else:
        for part in tensor.parts or (None,):
            yield source, _read_bytes(rows_of(source, part))


def _rows_of_piece(piece: TensorInfo) -> StridedRange:
    """Return the rows of `piece`, as far apart as they are along its innermost dimension with gaps."""
    width = piece.dtype.alignment
    run = 1
    for size, stride in zip(reversed(piece.shape), reversed(piece.strides or ()), strict=False):
        if size > 1 and stride != run:
            count = piece.num_elements // run
            return StridedRange(piece.span.start, run * width, count, stride * width)
        run *= size
    return StridedRange(piece.span.start, piece.span.num_bytes, 1, piece.span.num_bytes)


def _read_bytes(rows: StridedRange) -> int:
    return (rows.count - 1) * rows.stride + rows.row_bytes if gathers(rows) else rows.num_bytes
