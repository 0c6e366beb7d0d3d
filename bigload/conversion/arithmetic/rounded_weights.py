"""Weights rounded to the nearest number of 4 or 8 bits times a scale, without calibration.

- FP8 by blocks of a matrix, computed in float32: `Fp8Quantize` of transformers 5. Its scale is 448 over the largest
  absolute value; the reciprocal is stored.
- FP8 and integers by rows or groups of a row, computed in the dtype of the weight, symmetric: the `minmax` observer and
  the compressors of compressed-tensors 0.20. Integers are packed into words of 32 bits, lowest first, with half their
  range added.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Operation, Scratch, shape_of
from bigload.errors import CheckpointError
from bigload.units import MIB

if TYPE_CHECKING:
    import torch

_LARGEST_FP8 = 448.0
_BITS = {2: ("int16", 0x7FFF), 4: ("int32", 0x7FFFFFFF)}
"""Integers as wide as a float, and their bits without the sign, by bytes."""

_KNOWN_BYTES = 32 * MIB
_TILE_ELEMENTS = 256 * 1024
"""What is computed at a time of rows that have to come together: few enough to stay in a core's cache."""


@dataclass(frozen=True)
class Rounding:
    """How numbers are rounded.

    Attributes:
        bits: Of a number.
        is_float: Whether it is a float, E4M3.
        block: Rows and columns that share a scale; 0 columns for the whole row.
    """

    bits: int
    is_float: bool
    block: tuple[int, int]

    @property
    def is_by_block(self) -> bool:
        """Whether a scale is shared by several rows."""
        return self.block[0] > 1

    @property
    def is_packed(self) -> bool:
        """Whether words hold several numbers."""
        return not self.is_float

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many scales a matrix has, along its rows and its columns."""
        return rows // self.block[0], columns // (self.block[1] or columns)

    def scales(self, values: torch.Tensor, name: str, scratch: Scratch) -> torch.Tensor:
        """Return the scales of whole blocks of `values`, as they are stored."""
        import torch

        largest = self._largest(values, name, scratch)
        if self.is_by_block:
            return 1.0 / _factors(largest)
        half = _LARGEST_FP8 if self.is_float else ((1 << self.bits) - 1) / 2
        scales = largest / torch.tensor(half, dtype=largest.dtype)
        return torch.where(scales == 0, torch.tensor(torch.finfo(scales.dtype).eps, dtype=scales.dtype), scales)

    def codes(self, values: torch.Tensor, name: str, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers of whole blocks of `values`, [rows, columns], or [rows, words], and their scales."""
        import torch

        if self.is_by_block:
            return self._codes_by_block(values, name, scratch)
        scales = self.scales(values, name, scratch)
        by_scale = values.view(*scales.shape, -1)
        scaled = scratch("scaled", tuple(by_scale.shape), values.dtype)
        torch.div(by_scale, scales.unsqueeze(-1), out=scaled)
        if self.is_float:
            codes = scratch("result", tuple(values.shape), torch.float8_e4m3fn)
            return codes.copy_(scaled.clamp_(-_LARGEST_FP8, _LARGEST_FP8).view(values.shape)), scales
        # In float32 torch rounds much faster than in 16 bits, to the same integers: those hold all up to 256. They are
        # clamped afterwards, as integers, which is the same and twice as fast.
        rounded = scratch("rounded", tuple(scaled.shape), torch.float32).copy_(scaled).round_()
        edge = 1 << (self.bits - 1)
        numbers = scratch("integers", tuple(values.shape), torch.int16 if values.itemsize == 2 else torch.int32)
        numbers.view(scaled.shape).copy_(rounded).clamp_(-edge, edge - 1)
        words = scratch("result", (len(values), values.shape[1] * self.bits // 32), torch.int32)
        if self.bits == 8:
            words.view(torch.int8).copy_(numbers).bitwise_xor_(-128)
            return words, scales
        halves = scratch("halves", tuple(values.shape), torch.int8).copy_(numbers).add_(edge).view(torch.int16)
        pairs = scratch("pairs", tuple(halves.shape), torch.int16)
        words.view(torch.uint8).copy_(torch.bitwise_right_shift(halves, 4, out=pairs).bitwise_or_(halves))
        return words, scales

    def _codes_by_block(self, values: torch.Tensor, name: str, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        rows, columns = self.block
        factors = _factors(self._largest(values, name, scratch))
        is_bounded = bool(factors.isfinite().all())  # others exceed the largest by less than is rounded away
        codes = scratch("result", tuple(values.shape), torch.float8_e4m3fn)
        height = max(_TILE_ELEMENTS // values.shape[1] // rows, 1)
        width = max(_TILE_ELEMENTS // rows // columns, 1)
        for row in range(0, len(factors), height):
            for column in range(0, factors.shape[1], width):
                factor = factors[row : row + height, column : column + width]
                at = (
                    slice(row * rows, (row + height) * rows),
                    slice(column * columns, (column + width) * columns),
                )
                shape = len(factor) * rows, factor.shape[1] * columns
                scaled = scratch("scaled", shape, torch.float32).copy_(values[at])
                scaled.view(len(factor), rows, -1, columns).mul_(factor[:, None, :, None])
                codes[at] = scaled if is_bounded else scaled.clamp_(-_LARGEST_FP8, _LARGEST_FP8)
        return codes, 1.0 / factors

    def _largest(self, values: torch.Tensor, name: str, scratch: Scratch) -> torch.Tensor:
        """Return the largest absolute value of each block, [rows, columns] of the grid."""
        import torch

        rows, columns = self.grid(*values.shape)
        bits, mask = _BITS[values.itemsize]
        integers = getattr(torch, bits)
        # Without their signs, floats have the order of their bits, those that are not finite last.
        sizes = scratch("sizes", tuple(values.shape), integers)
        blocks = torch.bitwise_and(values.view(integers), mask, out=sizes).view(rows, self.block[0], columns, -1)
        largest = (blocks.amax(1) if self.is_by_block else blocks[:, 0]).amax(2).view(values.dtype)
        if not bool(largest.isfinite().all()):
            hint = "download the checkpoint again, or keep this weight plain: --keep-plain"
            raise CheckpointError(f"a value of {name} is not finite, so it cannot be quantised", hint=hint)
        return largest


def _factors(largest: torch.Tensor) -> torch.Tensor:
    """Return what numbers of blocks with these largest ones are multiplied by before they are rounded to FP8."""
    import torch

    largest = largest.float()
    return torch.where(largest > 0, _LARGEST_FP8 / largest, 1.0)


class KnownScales:
    """Scales that were computed with their numbers, until they are written: no weight has to be read for them again.

    Several threads use it. The latest stay, `_KNOWN_BYTES` of them; those that are not known are computed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scales: dict[str, tuple[torch.Tensor, bytearray]] = {}  # of all rows of a grid, and which are known

    def put(self, name: str, start: int, scales: torch.Tensor, num_rows: int) -> None:
        """Keep rows of the scales of the weight `name` from `start` on, of `num_rows` that it has."""
        with self._lock:
            if name not in self._scales:
                self._scales[name] = scales.new_empty(num_rows, scales.shape[1]), bytearray(num_rows)
            kept, known = self._scales.pop(name)
            kept[start : start + len(scales)] = scales
            known[start : start + len(scales)] = bytes([1]) * len(scales)
            self._scales[name] = kept, known
            while len(self._scales) > 1 and sum(each.nbytes for each, _ in self._scales.values()) > _KNOWN_BYTES:
                del self._scales[next(iter(self._scales))]

    def take(self, name: str, start: int, stop: int) -> torch.Tensor | None:
        """Return rows `start` to `stop`, if all are known; with the last one, the weight's are forgotten."""
        with self._lock:
            if name not in self._scales:
                return None
            kept, known = self._scales[name]
            if not all(known[start:stop]):
                return None
            if stop == len(kept):
                del self._scales[name]
            return kept[start:stop]


@dataclass(frozen=True)
class RoundedWeights(Operation):
    """The numbers that the rows of `source`, a matrix, are rounded to."""

    source: Operand
    rounding: Rounding
    scales: KnownScales = field(compare=False, repr=False)

    @property
    def row_multiple(self) -> int:
        return self.rounding.block[0]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        codes, scales = self.rounding.codes(_stored_form(self.source, operands[0]), self.source.name, scratch)
        num_rows = self.rounding.grid(*shape_of(self.source))[0]
        self.scales.put(self.source.name, start // self.row_multiple, scales, num_rows)
        return codes


@dataclass(frozen=True)
class ScalesOfWeights(Operation):
    """The scales that `RoundedWeights` of the same matrix are multiplied by: a row for each row of blocks."""

    source: Operand
    rounding: Rounding
    scales: KnownScales = field(compare=False, repr=False)

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        rows = self.rounding.block[0]
        return (OperandRows(self.source, start * rows, stop * rows),)

    def known(self, start: int, stop: int) -> torch.Tensor | None:
        """Return rows that were computed with the numbers."""
        return self.scales.take(self.source.name, start, stop)

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        return self.rounding.scales(_stored_form(self.source, operands[0]), self.source.name, scratch)


def _stored_form(source: Operand, values: torch.Tensor) -> torch.Tensor:
    """Return `values` in the dtype of `source`: those of a computed one are rounded as if it had been written first."""
    import torch

    assert source.dtype.torch_name is not None, "checked by quantised_tensors.py"
    return values.to(getattr(torch, source.dtype.torch_name))
