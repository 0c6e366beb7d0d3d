"""Weights of bitsandbytes in 4 bits: a number of 16 times the scale of its block, in float32.

Two numbers lie in a byte, high half first, in the order of memory; blocks go on from row to row. A scale is the largest
absolute value of its block, or, with double quantisation, `number of 256 * scale of its block of scales + offset`. The
arithmetic is that of `dequantize_4bit` of bitsandbytes 0.50 on a CPU, which rounds to the dtype that the weight had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Operation, Scratch
from bigload.dtypes import DType
from bigload.errors import CheckpointError

if TYPE_CHECKING:
    import torch

NUMBERS: Mapping[str, Sequence[float]] = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 1 / 192, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25),
        *(0.0, -1 / 192, -2 / 3, -1.0, -1 / 3, -0.5, -1 / 6, -0.25),
    ),
}
"""What the 16 numbers stand for: quantiles of a normal distribution; floats of 2 bits of exponent, over 12."""


@dataclass(frozen=True)
class QuantisedScales:
    """How bytes in place of scales become scales.

    Attributes:
        numbers: What 256 bytes stand for, [256, 1] in F32.
        scales: Those of blocks of scales, [blocks, 1] in F32.
        block: Scales of a block.
        offset: Added to all.
    """

    numbers: TensorInfo
    scales: TensorInfo
    block: int
    offset: float


@dataclass(frozen=True)
class FourBitWeights(Operation):
    """Rows of a weight.

    Attributes:
        packed: Bytes of two numbers, [bytes, 1].
        absmax: Scales, [blocks, 1]: in F32, or bytes with `nested`.
        columns: Of a row.
        block: Numbers that share a scale.
        numbers: Which of `NUMBERS`.
        dtype: That of the weight before it was quantised.
        nested: How bytes become scales.
    """

    packed: TensorInfo
    absmax: TensorInfo
    columns: int
    block: int
    numbers: str
    dtype: DType
    nested: QuantisedScales | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Numbers, scales, and what is needed for these."""
        nested = () if self.nested is None else (self.nested.numbers, self.nested.scales)
        return self.packed, self.absmax, *nested

    @property
    def scales(self) -> tuple[TensorInfo, ...]:
        """Operands that have to be finite."""
        return (self.absmax,) if self.nested is None else (self.nested.numbers, self.nested.scales)

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the bytes that hold the rows, the scales of their blocks, and all of what these are made of."""
        first, last = start * self.columns, stop * self.columns
        rows = [
            OperandRows(self.packed, first // 2, -(-last // 2)),
            OperandRows(self.absmax, first // self.block, -(-last // self.block)),
        ]
        if self.nested is not None:
            several = (self.nested.numbers, self.nested.scales)
            rows += [OperandRows(each, 0, each.num_elements, is_recent=True) for each in several]
        return rows

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        packed, absmax, *nested = (each.flatten() for each in operands)
        first, count = start * self.columns, (stop - start) * self.columns
        scales = self._scales(absmax, nested, first // self.block)
        values = _pairs(self.numbers).index_select(0, packed.int()).view(torch.float32)
        values = values[first % 2 : first % 2 + count]
        skipped = first % self.block
        if skipped or count % self.block:
            values.mul_(scales.repeat_interleave(self.block)[skipped : skipped + count])
        else:
            values.view(-1, self.block).mul_(scales.unsqueeze(-1))
        assert self.dtype.torch_name is not None, "a float of 16 or 32 bits"
        return values.view(stop - start, self.columns).to(getattr(torch, self.dtype.torch_name))

    def _scales(self, absmax: torch.Tensor, nested: Sequence[torch.Tensor], first_block: int) -> torch.Tensor:
        """Return the scales of the blocks from `first_block` on."""
        import torch

        scales = absmax
        if self.nested is not None:
            numbers, outer = nested
            index = torch.arange(first_block, first_block + len(absmax)) // self.nested.block
            scales = numbers[absmax.int()] * outer[index] + self.nested.offset
        if not bool(scales.isfinite().all()):
            name = self.scales[-1].name
            raise CheckpointError(f"a scale in {name} is not finite", hint="download the checkpoint again")
        return scales


@cache
def _pairs(numbers: str) -> torch.Tensor:
    """Return the two numbers of each byte, float32, as one of 64 bits, which is looked up at once."""
    import torch

    each = NUMBERS[numbers]
    return torch.tensor([(each[byte >> 4], each[byte & 15]) for byte in range(256)]).view(torch.int64).flatten()
