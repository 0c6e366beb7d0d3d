"""Moves of elements between tensors, drawn at random, and what they come to."""

from itertools import product
from math import prod

from hypothesis import strategies as st

from bigload.conversion import strided_pieces as pieces
from bigload.conversion.strided_pieces import PiecedTensor


def values_of(tensor, stored):
    """Return the elements of `tensor` by index, from those of the stored tensors in the order of memory."""
    found = {}
    for piece in tensor.pieces:
        for index in product(*map(range, piece.shape)):
            place = tuple(first + i for first, i in zip(piece.start, index, strict=True))
            assert place not in found
            found[place] = stored[piece.source][
                piece.offset + sum(i * step for i, step in zip(index, piece.strides, strict=True))
            ]
    assert len(found) == prod(tensor.shape)
    return found


def in_memory(tensor, stored):
    return [value for _, value in sorted(values_of(tensor, stored).items())]


def numbered(shapes):
    return {name: [(name, number) for number in range(prod(shape))] for name, shape in shapes.items()}


@st.composite
def bijections(draw):
    """Tensors that hold each element of `a` and `b` once, by moves of the kinds that models need."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    shapes = {"a": shape, "b": shape}
    made = [PiecedTensor.of(name, shape) for name in shapes]
    for move in draw(st.lists(st.sampled_from(["join", "cut", "turn", "halves", "shape", "stack"]), max_size=5)):
        one, dim = made.pop(0), 0
        if one.shape:
            dim = draw(st.integers(0, len(one.shape) - 1))
        if move == "join" and made and made[0].shape == one.shape:
            one = pieces.concatenated([one, made.pop(0)], dim)
        elif move == "stack" and made and made[0].shape == one.shape:
            one = pieces.concatenated([pieces.unsqueezed(one, dim), pieces.unsqueezed(made.pop(0), dim)], dim)
        elif move == "cut" and one.shape[dim] > 1:
            at = draw(st.integers(1, one.shape[dim] - 1))
            made.append(pieces.sliced(one, dim, at, one.shape[dim]))
            one = pieces.sliced(one, dim, 0, at)
        elif move == "turn":
            one = pieces.permuted(one, draw(st.permutations(range(len(one.shape)))))
        elif move == "halves" and one.shape[dim] > 1:
            one = pieces.concatenated([pieces.sliced(one, dim, start, one.shape[dim], 2) for start in (0, 1)], dim)
        elif move == "shape":
            one = pieces.reshaped(one, draw(st.sampled_from([(-1,), (-1, one.shape[-1]), (1, *one.shape)])))
        made.append(one)
    return shapes, {f"made.{number}": each for number, each in enumerate(made)}
