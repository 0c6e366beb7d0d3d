"""Rows of several tensors one after the other, or columns of them: matrices that a model fuses, of computed weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from bigload.conversion.computed_tensor import Operand, OperandRows, Operands, Operation, Scratch, shape_of
from bigload.conversion.strided_pieces import PiecedTensor

if TYPE_CHECKING:
    import torch


class RowRange(NamedTuple):
    """Columns `left` to `right` (exclusive) of rows `start` to `stop` of `tensor`."""

    tensor: Operand
    start: int
    stop: int
    left: int
    right: int


@dataclass(frozen=True)
class JoinedRows(Operation):
    """All `ranges` below one another, equally wide; of vectors, beside one another."""

    ranges: tuple[RowRange, ...]
    is_vector: bool = False

    @classmethod
    def of(cls, made: PiecedTensor, tensors: Mapping[str, Operand]) -> JoinedRows:
        """Return the rows of `made`, whose pieces are boxes of `tensors` by name, as wide as itself."""
        found = []
        for piece in made.pieces:
            tensor = tensors[piece.source]
            width = shape_of(tensor)[-1]
            *outer, height, columns = (1, *piece.shape) if len(piece.shape) == 1 else piece.shape
            assert piece.strides[-1] == 1 or columns == 1, "whole rows"
            assert height == 1 or (piece.strides[-2] == width and columns == made.shape[-1]), "whole rows"
            for index in product(*map(range, outer)):
                skipped = sum(number * stride for number, stride in zip(index, piece.strides, strict=False))
                row, left = divmod(piece.offset + skipped, width)
                place = [*map(sum, zip(piece.start, index, strict=False)), *piece.start[len(outer) :]]
                found.append((place, RowRange(tensor, row, row + height, left, left + columns)))
        found.sort(key=lambda each: each[0])
        return cls(tuple(each for _, each in found), is_vector=len(made.shape) == 1)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors, each once."""
        return tuple({id(each.tensor): each.tensor for each in self.ranges}.values())

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        return [OperandRows(each.tensor, each.start, each.stop) for each in self._between(start, stop)]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        import torch

        ranges = self._between(start, stop)
        parts = [rows[:, each.left : each.right] for each, rows in zip(ranges, operands, strict=True)]
        return torch.cat(parts, dim=1 if self.is_vector else 0)

    def _between(self, start: int, stop: int) -> Iterator[RowRange]:
        """Yield what of each range lies in rows `start` to `stop` of the whole."""
        position = 0
        for each in self.ranges:
            begin, end = max(start - position, 0), min(stop - position, each.stop - each.start)
            if begin < end:
                yield each._replace(start=each.start + begin, stop=each.start + end)
            position += 0 if self.is_vector else each.stop - each.start
