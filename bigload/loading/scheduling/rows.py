"""One row of a stored or assembled tensor along its first dimension, as a stored or assembled tensor of its own."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from bigload.checkpoint.model import AssembledTensor, Piece, Span, TensorInfo


def row_of(tensor: TensorInfo | AssembledTensor, index: int) -> TensorInfo | AssembledTensor:
    """Return `tensor[index]`; stored in one piece without gaps, it is a `TensorInfo`.

    Raises:
        ValueError: there is no such row, or it begins inside a byte (packed 4-bit elements).
    """
    if not tensor.shape or not 0 <= index < tensor.shape[0]:
        raise ValueError(f"row {index} of a tensor of shape {list(tensor.shape)}")
    if isinstance(tensor, TensorInfo):
        return _row(tensor, index, tensor.dtype.bits)
    pieces = tuple(
        Piece(piece.start[1:], _row(piece.tensor, index - piece.start[0], 8 * tensor.dtype.alignment))
        for piece in tensor.pieces
        if piece.start[0] <= index < piece.start[0] + piece.tensor.shape[0]
    )
    if len(pieces) == 1 and pieces[0].tensor.strides is None and tensor.dtype.bits >= 8:
        return replace(pieces[0].tensor, name=f"{tensor.name}[{index}]")
    return AssembledTensor(f"{tensor.name}[{index}]", tensor.dtype, tensor.shape[1:], pieces)


def _row(tensor: TensorInfo, index: int, bits: int) -> TensorInfo:
    """Return a row of a stored tensor, whose elements are `bits` wide as its shape counts them."""
    shape, strides = tensor.shape[1:], tensor.strides
    if strides is None:
        apart = length = prod(shape) * bits
    else:
        apart = strides[0] * bits
        reach = sum((size - 1) * stride for size, stride in zip(shape, strides[1:], strict=True))
        length = (1 + reach) * bits if prod(shape) else 0
        strides = strides[1:]
    if index * apart % 8 or length % 8:
        raise ValueError(f"row {index} of {list(tensor.shape)} cuts through bytes of packed {tensor.dtype.name}")
    start = tensor.span.start + index * apart // 8
    span = Span(tensor.span.file, start, start + length // 8)
    return TensorInfo(f"{tensor.name}[{index}]", tensor.dtype, shape, span, strides)
