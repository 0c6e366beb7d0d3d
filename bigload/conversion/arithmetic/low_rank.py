"""Weights with a LoRA adapter added: `base + scale * up @ down`, in float32, row by row.

The arithmetic and its order are those of PEFT's `get_delta_weight` and `merge` (peft 0.21, tuners/lora/layer.py and
dora.py) on a model in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Operation, Scratch, num_rows, shape_of

if TYPE_CHECKING:
    import torch

    from bigload.checkpoint.model import TensorInfo


@dataclass(frozen=True)
class LowRankSum(Operation):
    """Rows of `base` with those of a product of two small matrices added.

    Attributes:
        base: Weight [out, ...]; with `is_transposed` [in, out].
        down: `lora_A` [rank, ...].
        up: `lora_B` [out, rank, ...].
        scale: Factor of the product.
        is_transposed: The product is added as its transpose: Conv1D of transformers, embeddings.
        magnitude: Of DoRA: the norm of each output after the sum, [out].
        unmerged: Of DoRA: the weight before other adapters were added, from which PEFT takes the norm.
    """

    base: Operand
    down: TensorInfo
    up: TensorInfo
    scale: float
    is_transposed: bool = False
    magnitude: TensorInfo | None = None
    unmerged: Operand | None = None

    @property
    def row_multiple(self) -> int:
        """All rows of one output: what a convolution has for one channel. All rows where norms go across them."""
        if self.is_transposed:
            return num_rows(self.base) if self.magnitude is not None else 1
        return prod(shape_of(self.base)[1:-1])

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        small = (self.down, self.up) if self.magnitude is None else (self.down, self.up, self.magnitude)
        weights = (self.base,) if self.unmerged is None else (self.base, self.unmerged)
        return (
            *(OperandRows.all_of(each, is_recent=True) for each in small),
            *(OperandRows(each, start, stop) for each in weights),
        )

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        down, up, *others = (_wide(each, f"float32 {number}", scratch) for number, each in enumerate(operands))
        rank = self.down.shape[0]
        down, up = down.reshape(rank, -1), up.reshape(-1, rank)
        if self.is_transposed:
            outputs, down = slice(None), down[:, start:stop]
        else:
            outputs = slice(start // self.row_multiple, -(-stop // self.row_multiple))
            up = up[outputs]
        product = torch.mm(up, down, out=scratch("result", (len(up), down.shape[1]), torch.float32)).mul_(self.scale)
        if self.is_transposed:
            product = product.T
        if self.magnitude is None:
            (base,) = others
            return product.reshape(base.shape).add_(base)
        magnitude, base, *unmerged = others
        dim = 0 if self.is_transposed else 1
        weight = (unmerged[0] if unmerged else base).reshape(product.shape) + product
        factor = magnitude.flatten()[outputs] / torch.linalg.norm(weight, dim=dim)
        merged: torch.Tensor = (factor.unsqueeze(dim) * (base.reshape(product.shape) + product)).reshape(base.shape)
        return merged


@dataclass(frozen=True)
class StackedLowRankSum(Operation):
    """The same for weights of all experts in one tensor, as PEFT's `ParamWrapper` has it.

    Attributes:
        base: Weights [experts, rows, columns].
        down: `lora_A` [experts * rank, n]: expert after expert.
        up: `lora_B` [m, rank * experts]: the experts of a rank beside each other.
        scale: Factor of the product.
        is_transposed: `n` are the rows and `m` the columns of an expert's weight; otherwise the other way round.
    """

    base: Operand
    down: TensorInfo
    up: TensorInfo
    scale: float
    is_transposed: bool = False

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        small = (OperandRows.all_of(each, is_recent=True) for each in (self.down, self.up))
        return OperandRows(self.base, start, stop), *small

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        base, down, up = (each.float() for each in operands)
        experts, rows, _ = shape_of(self.base)
        down = down.reshape(experts, -1, down.shape[-1])
        up = up.reshape(up.shape[0], -1, experts)
        total = base.clone()
        for expert in range(start // rows, -(-stop // rows)):
            low, high = max(start - expert * rows, 0), min(stop - expert * rows, rows)
            if self.is_transposed:
                product = down[expert][:, low:high].T @ up[:, :, expert].T
            else:
                product = up[low:high, :, expert] @ down[expert]
            begin = expert * rows + low - start
            total[begin : begin + high - low] += product * self.scale
        return total


@dataclass(frozen=True)
class ScaledSum(Operation):
    """`base + scale * other`: a bias with that of an adapter (`lora_bias`)."""

    base: Operand
    other: TensorInfo
    scale: float

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        base, other = (each.float() for each in operands)
        return base + other * self.scale


def _wide(values: torch.Tensor, use: str, scratch: Scratch) -> torch.Tensor:
    """Return `values` in float32, in `scratch` unless they are."""
    import torch

    return values if values.dtype == torch.float32 else scratch(use, tuple(values.shape), torch.float32).copy_(values)
