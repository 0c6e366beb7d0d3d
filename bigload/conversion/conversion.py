"""The way from stored tensors to the tensors of a model, as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from bigload.checkpoint.model import AssembledTensor, Checkpoint, Piece, Span, StoredTensor, TensorInfo
from bigload.conversion.strided_pieces import PiecedTensor, StridedPiece, boxes_of, intersection, row_strides
from bigload.dtypes import DType


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Pieces and computed tensors that each tensor of a model is made of.

    Attributes:
        tensors: By their names in the model; shapes are those of the model.
        unexpected: Names of stored tensors that no tensor of the model takes anything of.
        ignored: Those among the rest for which the model's class says that they do not matter.
        problems: Why other tensors of the model cannot be made, a sentence each.
        written_shapes: Shapes of those whose shape in `tensors` is a finer one, of the same elements row by row.
    """

    tensors: Mapping[str, PiecedTensor]
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    written_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def of(self, checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
        """Return the tensors of the model as `checkpoint` stores them; see `made_of`."""
        return self.made_of(checkpoint.stored)

    def made_of(self, stored: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
        """Return the tensors of the model as they lie in files, in their order, if a checkpoint has `stored`.

        One that is a stored tensor, or consecutive rows of one, is a `TensorInfo` as any other. Where parts of stored
        tensors are in several files, these are assembled tensors themselves.
        """
        made = {
            name: _located(name, tensor, stored, self.written_shapes.get(name)) for name, tensor in self.tensors.items()
        }
        return dict(sorted(made.items(), key=lambda item: _position(item[1])))


def _position(tensor: StoredTensor) -> tuple[str, int]:
    first = tensor.pieces[0].tensor if isinstance(tensor, AssembledTensor) and tensor.pieces else tensor
    return (first.span.file, first.span.start) if isinstance(first, TensorInfo) else ("", 0)


def _located(
    name: str, tensor: PiecedTensor, stored: Mapping[str, StoredTensor], written: tuple[int, ...] | None
) -> StoredTensor:
    whole = stored[tensor.pieces[0].source]
    if tensor == as_stored(whole):
        return replace(whole, name=name)
    pieces = tuple(piece for each in tensor.pieces for piece in _pieces(each, stored[each.source]))
    if len(pieces) == 1 and pieces[0].tensor.strides is None:
        return TensorInfo(name, whole.dtype, _packed(written or tensor.shape, whole.dtype), pieces[0].tensor.span)
    return AssembledTensor(name, whole.dtype, tensor.shape, pieces, written)


def as_stored(tensor: StoredTensor) -> PiecedTensor:
    """Return a stored tensor as one piece. Of packed 4-bit elements, pairs are counted, as in torch."""
    strides = tensor.strides if isinstance(tensor, TensorInfo) else None
    return PiecedTensor.of(tensor.name, tensor.torch_shape, strides)


def _packed(shape: tuple[int, ...], dtype: DType) -> tuple[int, ...]:
    return (*shape[:-1], shape[-1] * 2) if dtype.bits == 4 else shape


def _pieces(piece: StridedPiece, stored: StoredTensor) -> Iterator[Piece]:
    """Yield the pieces of files that hold `piece` of a stored tensor."""
    if isinstance(stored, TensorInfo):
        yield Piece(piece.start, _cut_out(piece, stored))
        return
    for box in boxes_of(piece, stored.shape):
        for part in stored.pieces:
            cut = intersection(box, part.start, part.tensor.shape, part.tensor.strides)
            if cut is not None:
                yield Piece(cut.start, _cut_out(cut, part.tensor))


def _cut_out(piece: StridedPiece, stored: TensorInfo) -> TensorInfo:
    """Return the form in which `piece` is stored; without strides, if that is row by row."""
    width = stored.dtype.alignment
    begin = stored.span.start + piece.offset * width
    reach = 1 + sum((size - 1) * stride for size, stride in zip(piece.shape, piece.strides, strict=True))
    is_by_row = all(
        size == 1 or stride == usual
        for size, stride, usual in zip(piece.shape, piece.strides, row_strides(piece.shape), strict=True)
    )
    span = Span(stored.span.file, begin, begin + reach * width)
    strides = None if is_by_row else piece.strides
    return TensorInfo(stored.name, stored.dtype, piece.shape, span, strides)
