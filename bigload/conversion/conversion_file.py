"""Conversions as values that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from bigload.conversion.conversion import Conversion
from bigload.conversion.strided_pieces import PiecedTensor, StridedPiece


def conversion_to_values(conversion: Conversion) -> dict[str, object]:
    """Return `conversion` without its problems; sources are named once."""
    numbers: dict[str, int] = {}
    tensors = {
        name: [
            tensor.shape,
            [
                [numbers.setdefault(each.source, len(numbers)), each.offset, each.start, each.shape, each.strides]
                for each in tensor.pieces
            ],
        ]
        for name, tensor in conversion.tensors.items()
    }
    left: dict[str, object] = {"unexpected": conversion.unexpected, "ignored": conversion.ignored}
    if conversion.written_shapes:
        left["written_shapes"] = dict(conversion.written_shapes)
    return {"sources": list(numbers), "tensors": tensors, **left}


def conversion_from_values(found: Mapping[str, Any]) -> Conversion:
    """Return the conversion that `conversion_to_values` described.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it is none.
    """
    sources = found["sources"]
    tensors = {
        name: PiecedTensor(
            tuple(shape),
            tuple(
                StridedPiece(sources[source], offset, tuple(start), tuple(size), tuple(strides))
                for source, offset, start, size, strides in pieces
            ),
        )
        for name, (shape, pieces) in found["tensors"].items()
    }
    return Conversion(
        tensors=tensors,
        unexpected=tuple(found["unexpected"]),
        ignored=tuple(found["ignored"]),
        written_shapes={name: tuple(shape) for name, shape in dict(found.get("written_shapes", {})).items()},
    )


def check_pieces(conversion: Conversion, shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise ValueError unless all pieces lie within their tensors, and in sources of these `shapes`, stored by row."""
    for name, tensor in conversion.tensors.items():
        for piece in tensor.pieces:
            numbers = (piece.offset, *piece.start, *piece.shape, *piece.strides)
            are_numbers = all(isinstance(number, int) and number >= 0 for number in numbers)
            same_length = len(piece.start) == len(piece.shape) == len(piece.strides) == len(tensor.shape)
            if not (are_numbers and same_length and piece.source in shapes):
                raise ValueError(f"a piece of {name!r:.100} is not one")
            last = piece.offset + sum((n - 1) * step for n, step in zip(piece.shape, piece.strides, strict=True) if n)
            ends = (first + n for first, n in zip(piece.start, piece.shape, strict=True))
            is_inside = all(end <= size for end, size in zip(ends, tensor.shape, strict=True))
            if not is_inside or (0 not in piece.shape and last >= prod(shapes[piece.source])):
                raise ValueError(f"a piece of {name!r:.100} reaches beyond a tensor")
        if sum(prod(piece.shape) for piece in tensor.pieces) != prod(tensor.shape):
            raise ValueError(f"the pieces of {name!r:.100} do not fill it")
        written = conversion.written_shapes.get(name, tensor.shape)
        if not all(isinstance(size, int) and size >= 0 for size in written) or prod(written) != prod(tensor.shape):
            raise ValueError(f"{name!r:.100} has not as many elements as its shape")
