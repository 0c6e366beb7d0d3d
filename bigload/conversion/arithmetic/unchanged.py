"""Values as they are: those of a tensor, written in a dtype of their own whatever others become, or given numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.conversion.computed_tensor import Operand, Operands, Operation, Scratch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Unchanged(Operation):
    """The rows of `tensor`."""

    tensor: Operand

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        return operands[0]


@dataclass(frozen=True)
class ConstantRow(Operation):
    """A vector of given numbers, which are all whole or are written as float32."""

    values: tuple[float, ...]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        is_whole = all(isinstance(value, int) for value in self.values)
        return torch.tensor([self.values], dtype=torch.int64 if is_whole else torch.float32)
