"""The inverse of a conversion makes the stored tensors again."""

from math import prod

import pytest
from hypothesis import given
from piece_moves import bijections, in_memory, numbered

from bigload.conversion import strided_pieces as pieces
from bigload.conversion.inverse import inverse_of
from bigload.conversion.strided_pieces import PiecedTensor


@given(bijections())
def test_what_is_made_back_is_what_was_stored(drawn):
    shapes, made = drawn
    stored = numbered(shapes)
    written = {name: in_memory(tensor, stored) for name, tensor in made.items()}
    inverse = inverse_of(made, shapes)
    assert inverse.keys() == shapes.keys()
    for name, tensor in inverse.items():
        assert prod(tensor.shape) == prod(shapes[name])
        assert in_memory(tensor, written) == stored[name]


def test_boxes_stay_boxes():
    a, b = (PiecedTensor.of(name, (8, 6)) for name in "ab")
    experts = pieces.concatenated([pieces.unsqueezed(a, 0), pieces.unsqueezed(b, 0)], 0)
    inverse = inverse_of(
        {
            "experts": pieces.permuted(experts, (0, 2, 1)),
            "linear": pieces.reshaped(PiecedTensor.of("c", (2, 3, 4)), (2, 12)),
        },
        {"a": (8, 6), "b": (8, 6), "c": (2, 3, 4)},
    )
    assert [len(inverse[name].pieces) for name in "abc"] == [1, 1, 1]


def test_a_tensor_without_elements_is_one_without_elements():
    empty = PiecedTensor.of("a", (1, 0, 4))
    assert inverse_of({"made": empty}, {"a": (1, 0, 4)}) == {"a": PiecedTensor.of("made", (1, 0, 4))}


def test_a_tensor_that_is_only_partly_used_has_no_way_back():
    a = PiecedTensor.of("a", (4, 6))
    assert inverse_of({"made": pieces.sliced(a, 0, 0, 2)}, {"a": (4, 6)}) == {}


def test_rows_that_are_there_twice_do_not_stand_for_those_that_are_not():
    half = pieces.sliced(PiecedTensor.of("a", (4, 6)), 0, 0, 2)
    assert inverse_of({"made": pieces.concatenated([half, half], 0)}, {"a": (4, 6)}) == {}


def test_a_tensor_that_is_used_twice_comes_from_the_first():
    a = PiecedTensor.of("a", (4, 6))
    assert inverse_of({"one": a, "other": a}, {"a": (4, 6)})["a"].sources == ("one",)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("apart", [2, 3])
def test_rows_and_elements_that_take_turns_are_few_boxes(dim, apart):
    a = PiecedTensor.of("a", (600, 1200))
    parts = [pieces.sliced(a, dim, start, a.shape[dim], apart) for start in range(apart)]
    inverse = inverse_of({"made": pieces.concatenated(parts, dim)}, {"a": a.shape})["a"]
    assert inverse.shape == ((200 * 3 // apart, apart, 1200) if dim == 0 else (600, 400 * 3 // apart, apart))
    assert len(inverse.pieces) == apart


def test_the_turns_of_several_parts_of_a_tensor_are_few_boxes():
    a = PiecedTensor.of("a", (512, 64))
    heads = [pieces.sliced(a, 0, start, start + 128) for start in range(0, 512, 128)]
    turned = [pieces.sliced(head, 0, start, 128, 2) for head in heads for start in (0, 1)]
    inverse = inverse_of({"made": pieces.concatenated(turned, 0)}, {"a": a.shape})["a"]
    assert (inverse.shape, len(inverse.pieces)) == ((256, 2, 64), 8)
