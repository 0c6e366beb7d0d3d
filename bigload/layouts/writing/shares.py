"""Shares of ranks: which bytes of the output files each writes, as data.

Ranks write whole files where that is nearly even. Where some would have nothing to do, as with one large file, the
bytes of all files are put in a row and cut into equal shares. Slices for tensor-parallel ranks stay whole: several of
them are written side by side, so that the rows of which each takes some columns are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigload.layouts.output import OutputFile
from bigload.layouts.writing.windows import WINDOW_BYTES
from bigload.units import MIB

LEAST_GAIN_BYTES = 256 * MIB
"""Files are cut where the busiest rank has so much less to write then."""


@dataclass(frozen=True, slots=True)
class FileShare:
    """Bytes `start` to `stop` of a file, which one rank writes. The rank that writes its first byte finishes it."""

    output: OutputFile
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.stop == self.output.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def shares_of(files: Sequence[OutputFile], size: int, *, may_cut: bool) -> list[list[FileShare]]:
    """Return what each of `size` ranks writes, in the order of `files`; whole files unless `may_cut`."""
    whole = _whole_files(files, size)
    total = sum(output.num_bytes for output in files)
    busiest = max(sum(share.num_bytes for share in mine) for mine in whole)
    # Each byte is read, written and read back. A file that is cut is read back by one rank, while others wait.
    least_gain = max(LEAST_GAIN_BYTES, max((output.num_bytes for output in files), default=0) // 3)
    if busiest - total // size <= least_gain or any(tensor.parts for output in files for tensor in output.tensors):
        may_cut = False
    return _cut_files(files, size, total) if may_cut else whole


def _whole_files(files: Sequence[OutputFile], size: int) -> list[list[FileShare]]:
    """Give each file, largest first, to the rank with the fewest bytes."""
    loads = [0] * size
    rank_of = {}
    for output in sorted(files, key=lambda output: (-output.num_bytes, output.file)):
        rank = rank_of[output.file] = loads.index(min(loads))
        loads[rank] += output.num_bytes
    return [
        [FileShare(output, 0, output.num_bytes) for output in files if rank_of[output.file] == rank]
        for rank in range(size)
    ]


def _cut_files(files: Sequence[OutputFile], size: int, total: int) -> list[list[FileShare]]:
    """Cut all bytes into equal shares, at multiples of a window within their file."""
    shares: list[list[FileShare]] = [[] for _ in range(size)]
    before = 0
    for output in files:
        if not output.num_bytes:
            shares[0].append(FileShare(output, 0, 0))
        edges = [0]
        for rank in range(size):
            wanted = total * (rank + 1) // size - before
            stop = wanted // WINDOW_BYTES * WINDOW_BYTES if rank < size - 1 else output.num_bytes
            stop = min(max(stop, edges[-1]), output.num_bytes)
            if stop > edges[-1]:
                shares[rank].append(FileShare(output, edges[-1], stop))
            edges.append(stop)
        before += output.num_bytes
    return shares
