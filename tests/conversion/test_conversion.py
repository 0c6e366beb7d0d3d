"""Conversions of a checkpoint: plain tensors where possible, pieces of files elsewhere."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import bigload
from bigload.checkpoint.model import AssembledTensor, TensorInfo
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.strided_pieces import StridedPiece, boxes_of, concatenated, intersection, permuted, sliced


def converted(tmp_path, make):
    """Return what `make` makes of two matrices of 4 by 6 in one file, and the file's checkpoint."""
    save_file(
        {"a": torch.arange(24.0).reshape(4, 6), "b": torch.arange(24.0).reshape(4, 6)}, tmp_path / "a.safetensors"
    )
    checkpoint = bigload.open_checkpoint(tmp_path / "a.safetensors")
    made = make(*map(as_stored, checkpoint.tensors.values()))
    return Conversion(tensors={"made": made}).of(checkpoint)["made"], checkpoint.tensors["a"]


def test_a_renamed_tensor_is_the_stored_one_under_its_new_name(tmp_path):
    made, stored = converted(tmp_path, lambda a, _: a)
    assert made == TensorInfo("made", stored.dtype, stored.shape, stored.span)


def test_rows_of_a_tensor_are_a_tensor_of_that_byte_range(tmp_path):
    made, stored = converted(tmp_path, lambda a, _: sliced(a, 0, 1, 3))
    assert isinstance(made, TensorInfo)
    assert (made.shape, made.span.start - stored.span.start, made.span.num_bytes) == ((2, 6), 24, 48)


def test_columns_are_one_strided_piece(tmp_path):
    made, stored = converted(tmp_path, lambda a, _: sliced(a, 1, 4, 6))
    assert isinstance(made, AssembledTensor)
    (piece,) = made.pieces
    assert piece.tensor.strides == (6, 1)
    assert piece.tensor.span.start == stored.span.start + 16
    assert piece.tensor.span.num_bytes == (3 * 6 + 2) * 4  # from the first to the last


def test_a_transposed_tensor_is_a_strided_piece_and_not_a_strided_tensor(tmp_path):
    made, _ = converted(tmp_path, lambda a, _: permuted(a, (1, 0)))
    assert isinstance(made, AssembledTensor)
    assert made.shape == (6, 4)
    assert made.pieces[0].tensor.strides == (1, 6)


def test_a_joined_tensor_has_a_piece_of_each(tmp_path):
    made, _ = converted(tmp_path, lambda a, b: concatenated([a, b], 0))
    assert [(piece.start, piece.tensor.name, piece.tensor.strides) for piece in made.pieces] == [
        ((0, 0), "a", None),
        ((4, 0), "b", None),
    ]
    assert made.num_bytes == 2 * 96


@given(st.data())
def test_boxes_of_stored_tensors_in_parts_make_the_piece(data):
    """Any strided piece of a matrix: each of its elements comes from the one part that has it."""
    shape = (data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    size, form, strides = math.prod(shape), [], []
    offset = reach = data.draw(st.integers(0, size - 1))
    for _ in range(data.draw(st.integers(0, 3))):
        strides.append(data.draw(st.sampled_from([1, 2, 3, shape[1], 2 * shape[1], 3 * shape[1], size])))
        form.append(data.draw(st.integers(1, (size - 1 - reach) // strides[-1] + 1)))
        reach += (form[-1] - 1) * strides[-1]
    piece = StridedPiece("a", offset, tuple(0 for _ in form), tuple(form), tuple(strides))
    source = torch.arange(size).view(shape)
    made = torch.full(form, -1)
    row, column = (data.draw(st.integers(0, each)) for each in shape)
    parts = [
        ((top, left), source[top:bottom, left:right].clone(memory_format=torch.contiguous_format))
        for top, bottom in ((0, row), (row, shape[0]))
        for left, right in ((0, column), (column, shape[1]))
    ]
    for box in boxes_of(piece, shape):
        for start, part in parts:
            cut = intersection(box, start, part.shape, None)
            if cut is not None:
                place = made
                for dim, (begin, count) in enumerate(zip(cut.start, cut.shape, strict=True)):
                    place = place.narrow(dim, begin, count)
                assert (place == -1).all()
                place.copy_(part.as_strided(cut.shape, cut.strides, cut.offset))
    assert torch.equal(made, source.as_strided(form, strides, offset))
