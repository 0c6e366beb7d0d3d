"""StridedCopy bring every element of a part to its place, whatever the pieces it is stored in."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import AssembledTensor, Piece, Span, TensorInfo
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.dtypes import DTYPES
from bigload.loading.scheduling.piece_copies import spec_shape, strided_copies


@st.composite
def edges(draw, size):
    """Where to cut a dimension: from 0 to its size, in order."""
    return [0, *sorted(draw(st.sets(st.integers(0, size), max_size=3)) - {0, size}), size]


@st.composite
def stored_tensors(draw):
    """A 2-byte tensor of random shape, cut into boxes in several files; and the bytes of each file."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    boxes = [()]
    for size in shape:
        cuts = draw(edges(size))
        boxes = [(*box, cut) for box in boxes for cut in pairwise(cuts)]
    files, pieces = {}, []
    for number, box in enumerate(draw(st.permutations(boxes))):
        part = values[tuple(slice(start, stop) for start, stop in box)]
        strides = None
        stored = part
        if draw(st.booleans()) and part.dim() == 2:  # as a torch file stores a transposed matrix
            stored, strides = part.t(), (1, part.shape[0])
        lead = draw(st.integers(0, 3))
        file = f"{number}.safetensors"
        files[file] = b"?" * lead + bytes(
            stored.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).tolist()
        )
        span = Span(file, lead, len(files[file]))
        tensor = TensorInfo("a", DTYPES["I16"], tuple(part.shape), span, strides)
        pieces.append(Piece(tuple(start for start, _ in box), tensor))
    return AssembledTensor("a", DTYPES["I16"], shape, tuple(pieces)), values, files


@st.composite
def moved(draw, tensor):
    """What some random moves make of `tensor`, which may be a recorded one; the same moves for the same draws."""
    dims = tensor.dim()
    dim = draw(st.integers(0, max(dims - 1, 0)))
    size = tensor.shape[dim] if dims else 1
    moves = {
        "stacked": lambda each: torch.stack([each, each]),
        "flat": lambda each: each.reshape(-1),
    }
    if dims:
        step = draw(st.integers(1, 3))
        moves["by steps"] = lambda each: each[(slice(None),) * dim + (slice(draw_start, None, step),)]
        draw_start = draw(st.integers(0, size - 1)) if size else 0
        moves["interleaved"] = lambda each: torch.cat([each.narrow(dim, size // 2, size - size // 2), each], dim)
        moves["turned"] = lambda each: each.transpose(dim, 0)
        halves = [each for each in (2, 3) if size % each == 0 and size]
        if halves:
            count = draw(st.sampled_from(halves))
            shape = (*tensor.shape[:dim], size // count, count, *tensor.shape[dim + 1 :])
            moves["heads"] = lambda each: each.reshape(shape).transpose(dim, dim + 1).reshape(each.shape)
    return moves[draw(st.sampled_from(sorted(moves)))]


@given(stored_tensors(), st.data())
def test_every_element_of_a_part_of_a_converted_tensor_gets_to_its_place(drawn, data):
    stored, values, files = drawn
    made = RecordedTensor(as_stored(stored), values.dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        move = data.draw(moved(values))
        made, values = move(made), move(values)
    (tensor,) = Conversion(tensors={"made": made.origin}).made_of({"a": stored}).values()
    check_part(AssembledTensor.of(tensor), values, files, data)


@given(stored_tensors(), st.data())
def test_every_element_of_a_part_gets_to_its_place(drawn, data):
    check_part(*drawn, data)


def check_part(stored, values, files, data):
    spans, expected = [], values
    for dim, size in enumerate(stored.shape):
        cuts = list(pairwise(data.draw(edges(size))))
        ranges = sorted(data.draw(st.sets(st.sampled_from(cuts))))
        spans.append(tuple(ranges))
        indices = [index for start, stop in ranges for index in range(start, stop)]
        expected = expected.index_select(dim, torch.tensor(indices, dtype=torch.long))
    local = torch.full((torch.Size(spec_shape(spans)).numel(),), -1, dtype=torch.int16)
    num_bytes = 0
    for lines in strided_copies(stored, tuple(spans)):
        num_bytes += lines.num_bytes
        for run in range(lines.count):
            first = lines.start + run * lines.stride
            read = torch.frombuffer(bytearray(files[lines.file][first : first + lines.run_bytes]), dtype=torch.int16)
            target = lines.target + run * lines.target_stride
            local.as_strided((len(read),), (lines.target_step,), target).copy_(read)
    assert torch.equal(local.view(spec_shape(spans)), expected)
    assert num_bytes == expected.nbytes


def whole_spec(dtype, shape, num_bytes):
    return AssembledTensor.of(TensorInfo("a", DTYPES[dtype], shape, Span("f", 100, 100 + num_bytes)))


def test_rows_are_one_run_and_columns_one_in_each_row():
    stored = whole_spec("F32", (6, 8), 192)
    (rows,) = strided_copies(stored, (((2, 4),), ((0, 8),)))
    assert (rows.start, rows.run_bytes, rows.count, rows.target) == (164, 64, 1, 0)
    (columns,) = strided_copies(stored, (((0, 6),), ((2, 4),)))
    assert (columns.start, columns.run_bytes, columns.count, columns.stride) == (108, 8, 6, 32)


def test_packed_elements_are_counted_as_torch_does():
    stored = whole_spec("F4", (4, 6), 12)
    assert stored.shape == (4, 3)
    (lines,) = strided_copies(stored, (((1, 2),), ((0, 3),)))
    assert (lines.start, lines.run_bytes, lines.count) == (103, 3, 1)


def test_one_number_is_one_run_and_nothing_is_none():
    (lines,) = strided_copies(whole_spec("F64", (), 8), ())
    assert (lines.start, lines.run_bytes, lines.count, lines.target) == (100, 8, 1, 0)
    assert list(strided_copies(whole_spec("F64", (0, 3), 0), ((), ((0, 3),)))) == []
