"""Recorded tensors say where each element is stored, whatever moves torch makes with them."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.conversion.strided_pieces import PiecedTensor
from bigload.conversion.with_transformers.recorded_tensor import NotAMoveError, RecordedTensor

SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3)


def recorded(name, shape):
    return RecordedTensor(PiecedTensor.of(name, shape), torch.int64)


def assembled(origin, stored):
    """Return the tensor that pieces describe, made of the values of stored ones; -1 where no piece is."""
    made = torch.full(origin.shape, -1)
    for piece in origin.pieces:
        box = tuple(slice(first, first + size) for first, size in zip(piece.start, piece.shape, strict=True))
        made[box] = stored[piece.source].flatten().as_strided(piece.shape, piece.strides, piece.offset)
    return made


@st.composite
def moves(draw, shape):
    """One move that torch can make with a tensor of `shape`, as a function."""
    dims = range(len(shape))
    kinds = ["reshape", "unsqueeze", "squeeze", "contiguous"]
    kinds += ["slice", "chunk", "stack", "transpose", "permute", "select"] if shape else []
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.sampled_from(dims)) if shape else 0
    first = draw(st.integers(0, shape[dim] - 1)) if shape else 0
    stop, step = draw(st.integers(first + 1, shape[dim])) if shape else 1, draw(st.integers(1, 3))
    other, order = draw(st.sampled_from(dims)) if shape else 0, draw(st.permutations(dims))
    wanted = draw(shapes_of(math.prod(shape)))
    return {
        "reshape": lambda each: each.reshape(wanted),
        "slice": lambda each: each[(*[slice(None)] * dim, slice(first, stop, step))],
        "chunk": lambda each: each.chunk(2, dim)[-1],
        "stack": lambda each: torch.stack(each.unbind(dim)[::-1], -1),
        "transpose": lambda each: each.transpose(dim, other),
        "permute": lambda each: each.permute(order),
        "select": lambda each: each.select(dim, first - shape[dim]),
        "unsqueeze": lambda each: each.unsqueeze(-1),
        "squeeze": lambda each: each.squeeze(),
        "contiguous": lambda each: each.contiguous(),
    }[kind]


@st.composite
def shapes_of(draw, num_elements):
    shape = []
    while num_elements > 1 and draw(st.booleans()):
        size = draw(st.sampled_from([size for size in range(1, num_elements + 1) if num_elements % size == 0]))
        shape.append(size)
        num_elements //= size
    return draw(st.permutations([*shape, num_elements, 1]))


@given(st.data(), SHAPES, st.integers(1, 3))
def test_moves_of_recorded_tensors_are_those_of_torch(data, shape, count):
    names = [str(number) for number in range(count)]
    size = math.prod(shape)
    stored = {name: torch.arange(size).reshape(shape) + 1000 * int(name) for name in names}
    dim = data.draw(st.sampled_from(range(len(shape))))
    join = data.draw(st.sampled_from([torch.cat, torch.stack]))
    real, record = join(list(stored.values()), dim), join([recorded(name, shape) for name in names], dim)
    for _ in range(data.draw(st.integers(0, 5))):
        move = data.draw(moves(tuple(real.shape)))
        real, record = move(real), move(record)
        assert real.shape == record.shape
    assert torch.equal(assembled(record.origin, stored), real)
    assert sum(math.prod(piece.shape) for piece in record.origin.pieces) == real.numel()


@pytest.mark.parametrize("compute", [lambda each: each + 1, lambda each: each.sum(), lambda each: each @ each.T])
def test_an_operation_that_computes_is_refused_by_name(compute):
    with pytest.raises(NotAMoveError, match=r"aten\.(add|sum|mm)"):
        compute(RecordedTensor(PiecedTensor.of("w", (2, 2)), torch.float32))


def test_tensors_without_elements_keep_their_source():
    empty = recorded("w", (0, 3)).reshape(3, 0)[1:]
    assert empty.shape == (2, 0)
    assert empty.origin.sources == ("w",)


def test_a_cast_keeps_the_origin_and_has_the_new_dtype():
    cast = recorded("w", (2,)).to(torch.float16)
    assert cast.dtype == torch.float16
    assert cast.origin == PiecedTensor.of("w", (2,))


def test_a_parameter_made_of_a_recorded_tensor_keeps_its_origin():
    parameter = torch.nn.Parameter(RecordedTensor(PiecedTensor.of("w", (2,)), torch.float32))
    assert parameter.origin == PiecedTensor.of("w", (2,))
