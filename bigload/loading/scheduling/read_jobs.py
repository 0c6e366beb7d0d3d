"""Read jobs: one read each, with the places in memory that its bytes go to."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from bigload.dtypes import DType
from bigload.units import MIB

ALIGNMENT = 64
"""Of tensors in their buffer, in bytes."""

BLOCK_BYTES = 16 * MIB
"""Size of a read: large enough to drown the cost of the call, small enough to share a shard among threads."""

CPU = "cpu"


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
