"""Computed tensors: their elements follow from those of stored tensors by an operation, a few rows at a time.

A row is a vector along the last dimension; rows are numbered in the order of memory, with all other dimensions taken
together. A tensor without dimensions is one row of one element.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bigload.checkpoint.model import AssembledTensor, Span, TensorInfo
from bigload.dtypes import DType
from bigload.units import MIB

if TYPE_CHECKING:
    import torch


MOST_RECENT_BYTES = 256 * MIB
"""Of operands that are read as a whole for a few rows; each thread that computes may hold others."""


class OperandRows(NamedTuple):
    """Rows `start` to `stop` (exclusive) of `tensor`, wanted by an operation; all rows of one with strides.

    With `is_recent`, they are the same for many neighbouring rows, which lie across them: those used last stay in
    memory, so they may have `MOST_RECENT_BYTES`.
    """

    tensor: Operand
    start: int
    stop: int
    is_recent: bool = False

    @classmethod
    def all_of(cls, tensor: Operand, *, is_recent: bool = False) -> OperandRows:
        return cls(tensor, 0, num_rows(tensor), is_recent)

    @property
    def row_bytes(self) -> int:
        return self.tensor.num_bytes // max(num_rows(self.tensor), 1)

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.row_bytes


Operands = Sequence["torch.Tensor"]


class Scratch(Protocol):
    """Memory of one thread for the tensors of an operation: fresh memory costs more than most operations on it."""

    def __call__(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of any content; the next call with this `use` gets the same memory.

        "result" is for what the operation returns: where possible, it is the memory that this is wanted in.
        """
        ...


class Operation:
    """Computation of a tensor's rows, as a value: a base of frozen dataclasses.

    Equal ones compute equal rows, and `repr` tells others apart.
    """

    @property
    def row_multiple(self) -> int:
        """Rows are asked for from a multiple of this on, and up to one, or to the last row."""
        return 1

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All that is read for the whole tensor: the fields that are tensors, or tuples of tensors."""
        found: list[Operand] = []
        for value in vars(self).values():
            several = value if isinstance(value, tuple) else (value,)
            if several and isinstance(several[0], Operand):
                found += several
        return tuple(found)

    def rows_for(self, start: int, stop: int) -> Sequence[OperandRows]:
        """Return what is needed for rows `start` to `stop`: by default, the same rows of all operands."""
        return [OperandRows(each, start, stop) for each in self.operands]

    def compute(self, start: int, stop: int, operands: Operands, scratch: Scratch) -> torch.Tensor:
        """Return rows `start` to `stop`, of shape [rows, columns], from the operands that `rows_for` named.

        Those have the shape [rows, columns] and the dtype of their tensor; [rows, bytes of a row] and uint8 where torch
        has no such dtype; and their tensor's own shape where it has strides. The result may have another dtype than
        the tensor's: it is cast once, when it is written, and an operand that is computed comes as it was computed.
        It may lie in `scratch`, as long as the next call with that. Several threads call this at once.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor of `shape` that `operation` computes; `dtype` is what it is written in, unless something else is asked.

    Operands may be computed themselves.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    operation: Operation

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in memory, row by row."""
        return self.dtype.num_bytes(self.num_elements)

    def whole_rows(self, start: int, stop: int) -> tuple[int, int]:
        """Return the rows to compute where `start` to `stop` are wanted."""
        multiple = self.operation.row_multiple
        return start // multiple * multiple, min(-(-stop // multiple) * multiple, num_rows(self))

    @property
    def stored_operands(self) -> Iterator[TensorInfo]:
        """All stored tensors, or pieces of them, that it is computed from; some maybe more than once."""
        for operand in self.operation.operands:
            yield from stored_in(operand)


Operand = TensorInfo | AssembledTensor | ComputedTensor
"""What can be read row by row: stored as a whole, in pieces, or computed."""


def stored_in(tensor: Operand) -> Iterator[TensorInfo]:
    """Yield the stored tensors, or pieces of them, that `tensor` is made of."""
    if isinstance(tensor, ComputedTensor):
        yield from tensor.stored_operands
    elif isinstance(tensor, AssembledTensor):
        yield from (piece.tensor for piece in tensor.pieces)
    else:
        yield tensor


def shape_of(tensor: Operand) -> tuple[int, ...]:
    """Return the shape that a file states of `tensor`: that of rows which take turns is not their own."""
    return tensor.stored_shape if isinstance(tensor, AssembledTensor) else tensor.shape


def form_of(tensor: Operand) -> TensorInfo:
    """Return the name, dtype and shape of a tensor to write; its span is empty unless it is a stored one."""
    if isinstance(tensor, TensorInfo):
        return tensor
    return TensorInfo(tensor.name, tensor.dtype, shape_of(tensor), Span("", 0, tensor.num_bytes))


def num_rows(tensor: Operand) -> int:
    """Return the rows of `tensor`: vectors along its last dimension."""
    return prod(shape_of(tensor)[:-1])
