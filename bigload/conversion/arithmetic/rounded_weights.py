"""Weights rounded to the nearest number of 4 or 8 bits times a scale, without calibration.

- FP8 by blocks of a matrix, computed in float32: `Fp8Quantize` of transformers 5. Its scale is 448 over the largest
  absolute value; the reciprocal is stored.
- FP8 and integers by rows or groups of a row, computed in the dtype of the weight, symmetric: the `minmax` observer and
  the compressors of compressed-tensors 0.20. Integers are packed into words of 32 bits, lowest first, with half their
  range added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.conversion.computed_tensor import Operand, OperandRows, shape_of
from bigload.errors import CheckpointError

if TYPE_CHECKING:
    import torch

_LARGEST_FP8 = 448.0
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

    def scales(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return the scales of whole blocks of `values`, as they are stored.

        Raises:
            CheckpointError: a value is not finite.
        """
        import torch

        if self.is_by_block:
            return 1.0 / self._block_factors(values, name)
        largest = _largest(values.view(len(values), self.grid(*values.shape)[1], -1), (2,), name)
        half = _LARGEST_FP8 if self.is_float else ((1 << self.bits) - 1) / 2
        scales = largest / torch.tensor(half, dtype=largest.dtype)
        return torch.where(scales == 0, torch.tensor(torch.finfo(scales.dtype).eps, dtype=scales.dtype), scales)

    def codes(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return the numbers of whole blocks of `values`, [rows, columns], or [rows, words].

        Raises:
            CheckpointError: a value is not finite.
        """
        import torch

        if self.is_by_block:
            return self._codes_by_block(values, name)
        scales = self.scales(values, name)
        scaled = values.view(*scales.shape, -1) / scales.unsqueeze(-1)
        if self.is_float:
            return scaled.clamp_(-_LARGEST_FP8, _LARGEST_FP8).to(torch.float8_e4m3fn).view(values.shape)
        edge = 1 << (self.bits - 1)
        numbers = scaled.clamp_(-edge, edge - 1).round_().to(torch.int8).view(values.shape)
        return _packed(numbers.add_(edge) if self.bits < 8 else numbers.bitwise_xor_(-128), self.bits)

    def _codes_by_block(self, values: torch.Tensor, name: str) -> torch.Tensor:
        import torch

        rows, columns = self.block
        codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
        step = max(_TILE_ELEMENTS // rows // columns, 1) * columns
        for row in range(0, len(values), rows):
            for start in range(0, values.shape[1], step):
                tile = values[row : row + rows, start : start + step].float()
                factors = self._block_factors(tile, name)
                tile.view(rows, -1, columns).mul_(factors.view(-1, 1)).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
                codes[row : row + rows, start : start + step] = tile
        return codes

    def _block_factors(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return what numbers are multiplied by before they are rounded, [rows, columns] of the grid."""
        import torch

        rows, columns = self.grid(*values.shape)
        largest = _largest(values.view(rows, self.block[0], columns, self.block[1]), (3, 1), name).float()
        return torch.where(largest > 0, _LARGEST_FP8 / largest, 1.0)


def _largest(values: torch.Tensor, dims: tuple[int, ...], name: str) -> torch.Tensor:
    """Return the largest absolute values along `dims`."""
    largest = values.abs()
    for dim in dims:
        largest = largest.amax(dim)
    if not bool(largest.isfinite().all()):
        hint = "download the checkpoint again, or keep this weight plain: --keep-plain"
        raise CheckpointError(f"a value of {name} is not finite, so it cannot be quantised", hint=hint)
    return largest


def _packed(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Return words of 32 bits of bytes whose lowest `bits` are used."""
    import torch

    if bits == 4:
        pairs = numbers.view(torch.int16)
        numbers = (pairs >> 4).bitwise_or_(pairs).to(torch.uint8)
    return numbers.view(torch.int32)


@dataclass(frozen=True)
class RoundedWeights:
    """The numbers that the rows of `source`, a matrix, are rounded to."""

    source: Operand
    rounding: Rounding

    @property
    def row_multiple(self) -> int:
        """Rows that share scales."""
        return self.rounding.block[0]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The matrix."""
        return (self.source,)

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the same rows."""
        return (OperandRows(self.source, start, stop),)

    def compute(self, start: int, stop: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """Return the numbers.

        Raises:
            CheckpointError: a value is not finite.
        """
        return self.rounding.codes(_stored_form(self.source, operands[0]), self.source.name)


@dataclass(frozen=True)
class ScalesOfWeights:
    """The scales that `RoundedWeights` of the same matrix are multiplied by: a row for each row of blocks."""

    source: Operand
    rounding: Rounding
    row_multiple: int = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The matrix."""
        return (self.source,)

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the rows of the blocks."""
        rows = self.rounding.block[0]
        return (OperandRows(self.source, start * rows, stop * rows),)

    def compute(self, start: int, stop: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """Return the scales.

        Raises:
            CheckpointError: a value is not finite.
        """
        return self.rounding.scales(_stored_form(self.source, operands[0]), self.source.name)


@dataclass(frozen=True)
class ShapeOfWeights:
    """The shape of `source` as a vector of two numbers, which packed words do not tell."""

    source: Operand
    row_multiple: int = 1
    operands: tuple[Operand, ...] = ()

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:  # noqa: ARG002 - see Operation
        """Return nothing: it is known beforehand."""
        return ()

    def compute(self, start: int, stop: int, operands: Sequence[torch.Tensor]) -> torch.Tensor:  # noqa: ARG002
        """Return the numbers."""
        import torch

        return torch.tensor([shape_of(self.source)], dtype=torch.int64)


def _stored_form(source: Operand, values: torch.Tensor) -> torch.Tensor:
    """Return `values` in the dtype of `source`: those of a computed one are rounded as if it had been written first."""
    import torch

    assert source.dtype.torch_name is not None, "checked by quantised_tensors.py"
    return values.to(getattr(torch, source.dtype.torch_name))
