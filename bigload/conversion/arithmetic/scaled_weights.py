"""Weights stored as small numbers with scales: `(stored - zero point) * scale`, in float32.

The scale of an element is that of its part of a grid over the matrix: one for all, one for each row, one for a block of
rows and columns. Stored are 8-bit floats or integers, or integers of few bits packed into 32-bit words, lowest first,
with half their range added (`pack-quantized` of compressed-tensors 0.20).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.computed_tensor import OperandRows, Operands, Operation, Scratch
from bigload.errors import CheckpointError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ScaledWeights(Operation):
    """Rows of a weight [rows, columns].

    Attributes:
        stored: The numbers, [rows, columns], or [rows, words] where they are packed.
        scale: Scales, [rows of the grid, columns of the grid].
        block: Rows and columns of an element of the grid.
        columns: Of the weight.
        bits: Of a packed number; 0 where they are not packed.
        zero_point: What was added to the stored numbers, in the grid of the scales. Where these are packed, it is too:
            [words, columns of the grid], one word for 32 / bits rows.
        factor: What the products are multiplied by.
    """

    stored: TensorInfo
    scale: TensorInfo
    block: tuple[int, int]
    columns: int
    bits: int = 0
    zero_point: TensorInfo | None = None
    factor: float = 1.0

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the same rows of the numbers, and those of the grid that they lie in."""
        first, last = start // self.block[0], -(-stop // self.block[0])
        rows = [OperandRows(self.stored, start, stop), OperandRows(self.scale, first, last)]
        if self.zero_point is not None:
            each = 32 // self.bits if self.bits else 1
            rows.append(OperandRows(self.zero_point, first // each, -(-last // each)))
        return rows

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        stored, scale, *zero_point = operands
        values = scratch("result", (stop - start, self.columns), torch.float32)
        values.copy_(_unpacked(stored, self.bits)[:, : self.columns] if self.bits else stored)
        if zero_point:
            for part, zeros in self._by_grid(values, self._zeros(zero_point[0], start, stop), start):
                part.sub_(zeros)
        scale = scale.float()
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"a scale in {self.scale.name} is not finite", hint="download the checkpoint again")
        for part, scales in self._by_grid(values, scale, start):
            part.mul_(scales)
        return values if self.factor == 1 else values.mul_(self.factor)

    def _zeros(self, stored: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Return the zero points of the rows of the grid that rows `start` to `stop` lie in."""
        if not self.bits:
            return stored.float()
        first, last = start // self.block[0], -(-stop // self.block[0])
        skipped = first % (32 // self.bits)
        return _unpacked(stored.t().contiguous(), self.bits).t()[skipped : skipped + last - first]

    def _by_grid(
        self, values: torch.Tensor, grid: torch.Tensor, start: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield `values`, rows from `start` on, in parts, each with what of `grid` goes with its elements."""
        rows, columns = self.block
        if grid.shape[1] * columns == self.columns:
            values, grid = values.view(len(values), -1, columns), grid.unsqueeze(-1)
        elif grid.shape[1] > 1:
            grid = grid.repeat_interleave(columns, dim=1)[:, : self.columns]
        if rows == 1 or len(grid) == 1:
            yield values, grid
            return
        skipped = start % rows
        for number, row in enumerate(grid):
            yield values[max(number * rows - skipped, 0) : (number + 1) * rows - skipped], row


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return numbers.flatten(1).float() - (1 << (bits - 1))
