"""Windows of output files: byte ranges that are filled, written, digested and compared as a unit.

Windows begin and end at blocks of the disk, so they can be written past the page cache; only the end of a file is
uneven. Those of remote sources may begin and end at tensors instead. What comes from holes of sparse sources is in no
window, and stays a hole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from bigload.checkpoint.model import AssembledTensor, Span, TensorInfo
from bigload.conversion.computed_tensor import ComputedTensor
from bigload.layouts.output import OutputFile, OutputTensor
from bigload.layouts.writing.output_file_writer import BLOCK_BYTES
from bigload.layouts.writing.window_reader import Portion
from bigload.loading.scheduling.slices import StridedRange, rows_of
from bigload.machine.files.byte_ranges import merged_ranges
from bigload.units import KIB, MIB

WINDOW_BYTES = 4 * MIB
"""Large enough for the disk, small enough for many threads to have one each."""

COPIED_WINDOW_BYTES = 2 * MIB
"""For files in which nothing is computed: a cache of the processor holds these until they are written and compared."""

LEAST_CUT_BYTES = 256 * KIB
"""Smaller tensors share windows: a request of their own would not be worth it."""

Extents = Callable[[Span], Iterable[tuple[int, int]]]
"""Returns the parts of a span of a source file that hold data; the rest is a hole."""

_NEVER_ZERO = "F8_E8M0"
"""The one dtype in which zero bytes are not the number zero, so a hole does not stay one when it is cast."""


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes `start` to `stop` of a file.

    Bytes that `header`, `literals` (each with its offset in the window) and `portions` leave open are zeros: the rim of
    a hole.
    """

    start: int
    stop: int
    header: bytes
    portions: tuple[Portion, ...]
    literals: tuple[tuple[int, bytes], ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class DataRanges:
    """Byte ranges of an output file that hold data, as sorted pairs of start and stop; holes lie between them."""

    pairs: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(stop - start for start, stop in self.pairs)

    def without(self, other: DataRanges) -> DataRanges:
        """Return these ranges without the bytes in `other`."""
        left: list[tuple[int, int]] = []
        for start, stop in self.pairs:
            position = start
            for begin, end in other.pairs:
                if end <= position or begin >= stop:
                    continue
                if begin > position:
                    left.append((position, begin))
                position = end
            if position < stop:
                left.append((position, stop))
        return DataRanges(tuple(left))


def data_ranges(output: OutputFile, extents: Extents, *, block_bytes: int) -> DataRanges:
    """Return what of `output` is data, in whole blocks; the last may be cut short by the end of the file."""
    pairs = [(0, output.header_bytes)]
    for tensor, start in zip(output.tensors, output.starts(), strict=True):
        for begin, end in _data_of(tensor, extents):
            pairs.append((start + begin, start + end))
    pairs += [(start, start + len(gap)) for start, gap in output.literals()]
    blocks = [
        (first // block_bytes * block_bytes, min(-(-last // block_bytes) * block_bytes, output.num_bytes))
        for first, last in pairs
        if first < last
    ]
    return DataRanges(tuple(merged_ranges(blocks)))


def windows(
    output: OutputFile,
    ranges: DataRanges,
    *,
    begin: int = 0,
    window_bytes: int = WINDOW_BYTES,
    is_cut_at_tensors: bool = False,
) -> Iterator[Window]:
    """Yield the windows of `ranges` of `output` in file order, from the block at or before byte `begin` on.

    With `is_cut_at_tensors`, a tensor that is not small has windows of its own, which are then not of whole blocks.
    """
    starts = output.starts()
    cuts = _cuts(output, starts) if is_cut_at_tensors else []
    literals = output.literals()
    places = [start for start, _ in literals]
    header = b""
    for start, stop in ranges.pairs:
        left = start
        while left < stop:
            cut = bisect_right(cuts, left)
            right = min(left + window_bytes, stop, *cuts[cut : cut + 1])
            if right > begin:
                if left >= output.header_bytes:
                    header = b""  # that of 90,000 tensors takes memory
                elif not header:
                    header = output.header
                found = literals[max(bisect_right(places, left) - 1, 0) : bisect_right(places, right)]
                cut_out = tuple(_within(found, left, right))
                yield Window(left, right, header[left:right], tuple(_portions(output, starts, left, right)), cut_out)
            left = right


def _within(literals: Iterable[tuple[int, bytes]], left: int, right: int) -> Iterator[tuple[int, bytes]]:
    """Yield what of `literals` is in a window, with its offset there."""
    for start, content in literals:
        part = content[max(left - start, 0) : max(right - start, 0)]
        if part:
            yield max(start - left, 0), part


def _cuts(output: OutputFile, starts: list[int]) -> list[int]:
    """Return where tensors begin and end that are not small, and where those of another file begin."""
    edges: set[int] = set()
    file = ""
    for tensor, start in zip(output.tensors, starts, strict=True):
        if tensor.num_bytes >= LEAST_CUT_BYTES:
            edges |= {start, start + tensor.num_bytes}
        if isinstance(tensor.source, TensorInfo):
            before, file = file, tensor.source.span.file
            if before not in ("", file) and start % BLOCK_BYTES == 0:  # else windows would no longer be whole blocks
                edges.add(start)
    return sorted(edges)


def _data_of(tensor: OutputTensor, extents: Extents) -> Iterable[tuple[int, int]]:
    """Return the bytes of the written tensor that come from data."""
    source, num_bytes = tensor.source, tensor.num_bytes
    if not num_bytes:
        return ()
    if isinstance(source, ComputedTensor):  # zeros may become anything
        return ((0, num_bytes),)
    spans = (source.span,) if isinstance(source, TensorInfo) else tensor.spans
    found = [found for span in spans for found in extents(span)]
    keeps_holes = tensor.dtype is source.dtype or _NEVER_ZERO not in (source.dtype.name, tensor.dtype.name)
    if not found and keeps_holes:
        return ()
    whole = [(span.start, span.stop) for span in spans]
    if not keeps_holes:
        found = whole
    if found == whole or isinstance(source, AssembledTensor) or len(tensor.parts) > 1 or source.strides is not None:
        return ((0, num_bytes),)  # rearranged: where there is any data, take it for everywhere
    return _written(tensor, source, found)


def _written(tensor: OutputTensor, source: TensorInfo, found: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield where bytes of the file of `source` are in the written tensor, which has one part of it at most."""
    rows = rows_of(source, tensor.parts[0] if tensor.parts else None)
    stored, written = source.dtype.bits, tensor.dtype.bits
    for begin, end in found:
        start, stop = _touched(rows, begin, end)
        if start < stop:
            yield start * written // stored, min(-(-stop * written // stored), tensor.num_bytes)


def _touched(rows: StridedRange, begin: int, end: int) -> tuple[int, int]:
    """Return which bytes of `rows`, put one after the other, lie between these of the file; of several, whole rows."""
    if rows.count == 1:
        return max(begin - rows.start, 0), min(end - rows.start, rows.row_bytes)
    first, last = (
        max((begin - rows.start) // rows.stride, 0),
        min((end - 1 - rows.start) // rows.stride, rows.count - 1),
    )
    return first * rows.row_bytes, (last + 1) * rows.row_bytes


def _portions(output: OutputFile, starts: list[int], left: int, right: int) -> Iterator[Portion]:
    index = max(bisect_right(starts, left) - 1, 0)
    for position in range(index, len(starts)):
        tensor, start = output.tensors[position], starts[position]
        if start >= right:
            return
        begin, end = max(left, start), min(right, start + tensor.num_bytes)
        if begin < end:
            yield Portion(tensor, begin - start, end - start, begin - left)
