import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.loading.scheduling.slices import Slice, StridedRange, rows_of, sliced_shape
from builders import num_bytes_of


def info(dtype, *shape, start=0):
    return TensorInfo("a", DTYPES[dtype], shape, Span("file", start, start + num_bytes_of(dtype, shape)))


def test_the_example_of_the_docstring_holds():
    rows = rows_of(info("BF16", 3, 8, start=100), Slice(1, 2, 4))
    assert rows == StridedRange(104, 4, 3, 16)
    assert [rows.start + row * rows.stride for row in range(rows.count)] == [104, 120, 136]


def test_all_of_a_tensor_and_its_rows_are_one_stretch():
    matrix = info("F32", 4, 8, start=8)
    assert rows_of(matrix, None) == StridedRange(8, 128, 1, 128)
    assert rows_of(matrix, Slice(0, 1, 3)) == StridedRange(40, 64, 1, 64)
    assert rows_of(matrix, Slice(1, 0, 8)).count == 1
    assert rows_of(info("F32", 1, 8), Slice(1, 2, 4)) == StridedRange(8, 8, 1, 8)


def test_an_empty_part_has_no_bytes():
    assert rows_of(info("F32", 4, 8), Slice(1, 3, 3)).num_bytes == 0
    assert sliced_shape(info("F32", 4, 8), Slice(1, 3, 3)) == (4, 0)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).flatmap(
        lambda shape: st.tuples(st.just(shape), st.integers(0, len(shape) - 1))
    ),
    st.data(),
)
def test_the_rows_hold_the_elements_of_the_part_in_their_order(shape_and_dim, data):
    import torch

    shape, dim = shape_and_dim
    start = data.draw(st.integers(0, shape[dim]))
    part = Slice(dim, start, data.draw(st.integers(start, shape[dim])))
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    rows = rows_of(info("U8", *shape), part)
    found = [rows.start + row * rows.stride + byte for row in range(rows.count) for byte in range(rows.row_bytes)]
    wanted = numbers.narrow(dim, start, part.stop - start)
    assert found == wanted.flatten().tolist()
    assert sliced_shape(info("U8", *shape), part) == tuple(wanted.shape)


@pytest.mark.parametrize("bad", [(-1, 0, 1), (0, -1, 1), (0, 3, 2)])
def test_a_slice_that_no_tensor_could_have_is_refused(bad):
    with pytest.raises(ValueError, match="expected a dimension of 0 or more"):
        Slice(*bad)


@pytest.mark.parametrize(
    ("part", "words"),
    [(Slice(2, 0, 1), "dimension 2 of a tensor of shape"), (Slice(1, 0, 9), "elements 0 to 9 along dimension 1")],
)
def test_a_part_that_this_tensor_lacks_is_refused(part, words):
    with pytest.raises(ValueError, match=words):
        rows_of(info("F32", 4, 8), part)


def test_packed_elements_are_cut_between_bytes_only():
    packed = info("F4", 4, 8)
    assert rows_of(packed, Slice(1, 2, 6)) == StridedRange(1, 2, 4, 4)
    assert rows_of(packed, Slice(0, 1, 2)).row_bytes == 4
    with pytest.raises(ValueError, match="cuts through bytes of packed F4"):
        rows_of(packed, Slice(1, 1, 4))
