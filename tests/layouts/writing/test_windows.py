import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.layouts.output import OutputFile, OutputTensor
from bigload.layouts.writing import windows as windows_module
from bigload.layouts.writing.windows import DataRanges, data_ranges, windows
from bigload.loading.scheduling.slices import Slice

BLOCK = 16
"""Of the disk, here: small files show the same as large ones."""


def tensor(name, num_bytes, *, start=0, dtype="U8", to=None, parts=(), shape=None):
    info = TensorInfo(name, DTYPES[dtype], shape or (num_bytes,), Span("source", start, start + num_bytes))
    return OutputTensor(source=info, dtype=DTYPES[to or dtype], parts=parts)


def raw(*tensors):
    return OutputFile(file="out.dat", tensors=tensors, is_raw=True)


def everything(span):
    return [(span.start, span.stop)]


def holes_but(*pairs):
    """All of the source is a hole but for `pairs`."""

    def extents(span):
        for start, stop in pairs:
            if max(start, span.start) < min(stop, span.stop):
                yield max(start, span.start), min(stop, span.stop)

    return extents


def of(output, extents=everything):
    return data_ranges(output, extents, block_bytes=BLOCK).pairs


def test_a_dense_file_is_one_range_to_its_uneven_end():
    assert of(raw(tensor("a", 20), tensor("b", 0), tensor("c", 17))) == ((0, 37),)


def test_the_header_is_data():
    output = OutputFile(file="out.safetensors", tensors=(tensor("a", 100),))
    assert of(output, holes_but()) == ((0, len(output.header)),)


def test_a_file_of_nothing_has_no_range():
    assert of(raw(tensor("a", 0))) == ()


def test_data_among_holes_is_taken_in_whole_blocks_that_merge():
    output = raw(tensor("a", 100), tensor("b", 100, start=100))
    assert of(output, holes_but((17, 18), (30, 40), (190, 191))) == ((16, 48), (176, 192))
    assert of(output, holes_but((195, 196))) == ((192, 200),)


def test_holes_follow_the_tensor_to_its_new_place():
    output = raw(tensor("b", 64, start=100), tensor("a", 64))
    assert of(output, holes_but((0, 16))) == ((64, 80),)


def test_a_cast_stretches_what_is_data():
    assert of(raw(tensor("a", 64, dtype="BF16", to="F32", shape=(32,))), holes_but((32, 40))) == ((64, 80),)
    assert of(raw(tensor("a", 64, dtype="F32", to="BF16", shape=(16,))), holes_but((33, 34))) == ((16, 32),)


@pytest.mark.parametrize(("dtype", "to"), [("F8_E8M0", "F32"), ("F32", "F8_E8M0")])
def test_where_zero_bytes_are_no_zero_a_cast_fills_the_holes(dtype, to):
    written = tensor("a", 64, dtype=dtype, to=to, shape=(64 * 8 // DTYPES[dtype].bits,))
    assert of(raw(written), holes_but()) == ((0, written.num_bytes),)


def test_where_zero_bytes_are_no_zero_but_nothing_is_cast_holes_stay():
    assert of(raw(tensor("a", 64, dtype="F8_E8M0")), holes_but()) == ()


def test_what_is_rearranged_is_all_data_or_all_hole():
    cut = tensor("a", 64, shape=(8, 8), parts=(Slice(1, 0, 4), Slice(1, 6, 8)))
    assert of(raw(cut), holes_but((1, 2))) == ((0, 48),)
    assert of(raw(cut), holes_but()) == ()


def test_columns_of_rows_in_holes_are_holes():
    cut = tensor("a", 64 * 32, shape=(64, 32), parts=(Slice(1, 8, 24),))
    assert of(raw(cut), holes_but((40, 41))) == ((16, 32),)
    assert of(raw(cut), holes_but((0, 1), (2047, 2048))) == ((1008, 1024),)  # columns before the cut are not asked


@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12)),
    st.integers(0, 2),
    st.data(),
    st.integers(0, 9),
)
def test_what_comes_from_data_is_in_a_range(shape, dim, data, start):
    edges = sorted(data.draw(st.tuples(*[st.integers(0, shape[dim])] * 2)))
    size = shape[0] * shape[1] * shape[2]
    cut = tensor("a", size, start=start, shape=shape, parts=(Slice(dim, *edges),))
    begin, end = sorted(data.draw(st.tuples(*[st.integers(start, start + size)] * 2)))
    found = {position for first, last in of(raw(cut), holes_but((begin, end))) for position in range(first, last)}
    sources = np.arange(start, start + size).reshape(shape).take(range(*edges), axis=dim).ravel()
    assert found >= {position for position, source in enumerate(sources) if begin <= source < end}


sorted_pairs = st.lists(st.integers(0, 400), unique=True, max_size=12).map(
    lambda edges: [(a * BLOCK, b * BLOCK) for a, b in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False)]
)


def bytes_in(pairs):
    return {position for start, stop in pairs for position in range(start, stop, BLOCK)}


@given(sorted_pairs, sorted_pairs)
def test_without_is_the_difference_of_sets(these, those):
    left = DataRanges(tuple(these)).without(DataRanges(tuple(those)))
    assert bytes_in(left.pairs) == bytes_in(these) - bytes_in(those)
    assert left.num_bytes == len(bytes_in(left.pairs)) * BLOCK
    assert all(start < stop for start, stop in left.pairs)
    assert list(left.pairs) == sorted(left.pairs)


def test_tensors_that_are_not_small_have_windows_of_their_own(monkeypatch):
    monkeypatch.setattr(windows_module, "LEAST_CUT_BYTES", 50)
    sizes = (10, 120, 20, 30, 60)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    made = zip(sizes, starts, strict=True)
    tensors = tuple(tensor(f"t{n}", size, start=start) for n, (size, start) in enumerate(made))
    output = OutputFile(file="out", tensors=tensors, is_raw=True)
    whole = DataRanges(((0, sum(sizes)),))
    found = list(windows(output, whole, window_bytes=100, is_cut_at_tensors=True))
    assert [(window.start, window.stop) for window in found] == [(0, 10), (10, 110), (110, 130), (130, 180), (180, 240)]
    assert [len(window.portions) for window in found] == [1, 1, 1, 2, 1]
    assert list(windows(output, whole, window_bytes=100, is_cut_at_tensors=True, begin=110)) == found[2:]


def test_a_window_of_small_tensors_ends_where_those_of_another_file_begin(monkeypatch):
    monkeypatch.setattr(windows_module, "BLOCK_BYTES", BLOCK)
    sources = [("a", 16), ("a", 16), ("b", 8), ("a", 24)]
    tensors = tuple(
        OutputTensor(source=TensorInfo(f"t{n}", DTYPES["U8"], (size,), Span(file, 0, size)), dtype=DTYPES["U8"])
        for n, (file, size) in enumerate(sources)
    )
    found = windows(raw(*tensors), DataRanges(((0, 64),)), window_bytes=64, is_cut_at_tensors=True)
    assert [(window.start, window.stop) for window in found] == [(0, 32), (32, 64)]  # 40 is within a block


@st.composite
def files(draw):
    sizes = draw(st.lists(st.integers(0, 90), min_size=1, max_size=8))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    tensors = tuple(
        tensor(f"t{n}", size, start=start) for n, (size, start) in enumerate(zip(sizes, starts, strict=True))
    )
    data = draw(sorted_pairs)
    return OutputFile(file="out", tensors=tensors, is_raw=draw(st.booleans())), holes_but(*data)


@given(files(), st.integers(1, 6), st.integers(0, 700))
def test_windows_hold_every_byte_of_data_once_and_in_order(made, blocks, begin):
    output, extents = made
    ranges = data_ranges(output, extents, block_bytes=BLOCK)
    source = bytes(range(1, 252)) * 4
    data = {t.name: source[t.source.span.start : t.source.span.stop] for t in output.tensors}
    expected = output.header + b"".join(data[t.name] for t in output.tensors)
    found = list(windows(output, ranges, begin=begin, window_bytes=blocks * BLOCK))
    position = begin // BLOCK * BLOCK
    covered = bytearray(output.num_bytes)
    for number, window in enumerate(found):
        assert window.start % BLOCK == 0
        assert window.stop % BLOCK == 0 or window.stop == output.num_bytes
        assert window.num_bytes <= blocks * BLOCK
        assert number == 0 or found[number - 1].stop <= window.start
        content = bytearray(window.num_bytes)
        content[: len(window.header)] = window.header
        for portion in window.portions:
            part = data[portion.tensor.name][portion.start : portion.stop]
            content[portion.at : portion.at + len(part)] = part
        assert content == expected[window.start : window.stop]
        covered[window.start : window.stop] = b"\1" * window.num_bytes
    wanted = [p for start, stop in ranges.pairs for p in range(max(start, position), stop)]
    assert all(covered[position] for position in wanted if position >= begin)
    assert sum(covered) <= ranges.num_bytes


def test_a_header_of_many_windows_is_made_once(monkeypatch):
    output = OutputFile(file="out.safetensors", tensors=tuple(tensor(f"tensor.{n}", 8, start=8 * n) for n in range(50)))
    ranges, header, made = DataRanges(((0, output.num_bytes),)), output.header, []
    monkeypatch.setattr(OutputFile, "header", property(lambda _: made.append(1) or header))
    found = list(windows(output, ranges, window_bytes=BLOCK))
    assert b"".join(window.header for window in found) == header
    assert len(made) == 1
