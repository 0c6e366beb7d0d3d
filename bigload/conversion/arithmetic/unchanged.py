"""Values as they are: a tensor that is written in another dtype than it is stored in, whatever others are cast to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Scratch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Unchanged:
    """The rows of `tensor`."""

    tensor: Operand
    row_multiple: int = 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensor."""
        return (self.tensor,)

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return the same rows."""
        return (OperandRows(self.tensor, start, stop),)

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        """Return them."""
        return operands[0]
