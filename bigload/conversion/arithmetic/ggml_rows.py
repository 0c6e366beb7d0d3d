"""Rows of weights in the order and form of ggml: rotated heads rearranged, experts stacked, values as Q8_0.

The forms are those of llama.cpp's `convert_hf_to_gguf.py`, the arithmetic of Q8_0 is that of `quants.py` in gguf 0.19,
to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.conversion.arithmetic.unchanged import Unchanged
from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Operation, Scratch, num_rows, shape_of

if TYPE_CHECKING:
    import torch

_BLOCK = 32


@dataclass(frozen=True)
class GgmlRows(Operation):
    """Rows of a tensor as a GGUF file has them; the inverse of `ggml_blocks.GgmlValues`.

    Attributes:
        tensors: The tensor, or those of all experts, of equal shapes, to be stacked.
        num_heads: Heads whose halves are to take turns, for llama.cpp's rotary embedding; 0 keeps the order.
        added: Added to every value.
        is_q8_0: Rows are blocks of Q8_0, as bytes.
    """

    tensors: tuple[Operand, ...]
    num_heads: int = 0
    added: float = 0.0
    is_q8_0: bool = False

    @property
    def row_multiple(self) -> int:
        """The rows of a head, where they are rearranged."""
        is_vector = len(shape_of(self.tensors[0])) == 1
        return num_rows(self.tensors[0]) // self.num_heads if self.num_heads and not is_vector else 1

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the same rows, of the experts that have them."""
        height = num_rows(self.tensors[0])
        first, last = start // height, -(-stop // height)
        return [
            OperandRows(self.tensors[each], max(start - each * height, 0), min(stop - each * height, height))
            for each in range(first, last)
        ]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        values = torch.cat(list(operands)) if len(operands) > 1 else operands[0]
        if self.added:
            values = values.float() + self.added
        if self.num_heads:
            # of each head, rows or elements 0 and h/2, 1 and h/2 + 1 ... take turns
            is_vector = len(shape_of(self.tensors[0])) == 1
            half, width = (
                (values.shape[1] // self.num_heads // 2, 1) if is_vector else (self.row_multiple // 2, values.shape[1])
            )
            values = values.view(-1, 2, half, width).transpose(1, 2).reshape(values.shape)
        return q8_0(values.float()) if self.is_q8_0 else values


@dataclass(frozen=True)
class ReorderedRows(Operation):
    """Blocks of `size` rows of all `tensors`, numbered through, in another order; of vectors, blocks of elements."""

    tensors: tuple[Operand, ...]
    size: int
    order: tuple[int, ...]

    @property
    def row_multiple(self) -> int:
        """The rows of a block."""
        return 1 if self._is_vector else self.size

    @property
    def _is_vector(self) -> bool:
        return len(shape_of(self.tensors[0])) == 1

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the rows of each block, those of neighbours together."""
        if self._is_vector:
            return [OperandRows.all_of(each) for each in self.tensors]
        counts = [num_rows(each) // self.size for each in self.tensors]
        found = list[OperandRows]()
        for block in self.order[start // self.size : -(-stop // self.size)]:
            number = next(each for each in range(len(counts)) if block < sum(counts[: each + 1]))
            first = (block - sum(counts[:number])) * self.size
            rows = OperandRows(self.tensors[number], first, first + self.size)
            if found and found[-1].tensor is rows.tensor and found[-1].stop == rows.start:
                rows = found.pop()._replace(stop=rows.stop)
            found.append(rows)
        return found

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        joined = torch.cat(list(operands), dim=1 if self._is_vector else 0)
        return joined.view(-1, self.size)[list(self.order)].view(1, -1) if self._is_vector else joined


@dataclass(frozen=True)
class NegatedExponential(Unchanged):
    """`-exp(x)` of every value, as llama.cpp has the decay of Mamba; or its inverse."""

    is_inverse: bool = False

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        values = operands[0].float()
        return values.neg().log() if self.is_inverse else values.exp().neg()


def q8_0(values: torch.Tensor) -> torch.Tensor:
    """Return blocks of Q8_0 as bytes, [rows, columns / 32 * 34], of float32 values of shape [rows, columns]."""
    import torch

    blocks = values.reshape(-1, _BLOCK)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    # gguf-py rounds halves away from zero; torch rounds them to even numbers
    scaled = blocks * torch.where(scale == 0, 0, 1 / scale)
    size = scaled.abs()
    floor = size.floor()
    rounded = scaled.sign() * (floor + (2 * (size - floor)).floor())
    parts = [scale.to(torch.float16).view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)]
    return torch.cat(parts, dim=1).reshape(values.shape[0], -1)
