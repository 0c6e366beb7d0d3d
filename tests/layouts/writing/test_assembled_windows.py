"""Windows of tensors that are assembled from pieces of stored ones hold the elements in their places."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.model import AssembledTensor, Checkpoint, Span, TensorInfo
from bigload.conversion import strided_pieces as pieces
from bigload.conversion.conversion import Conversion, as_stored
from bigload.dtypes import DTYPES
from bigload.layouts.output import OutputTensor
from bigload.layouts.writing.window_reader import Portion, WindowReader, jobs_for
from bigload.loading.scheduling.read_jobs import Delivery

torch = pytest.importorskip("torch")


class _Sources:
    def __init__(self, readers):
        self._readers = readers

    def past_cache(self, file):
        return nullcontext(self._readers[file])

    through_cache = past_cache


def _checkpoint(shape, dtype):
    tensors = {
        name: TensorInfo(name, dtype, shape, Span(name, start, start + dtype.alignment * torch.Size(shape).numel()))
        for name, start in (("a", 0), ("b", 24), ("c", 5))
    }
    return Checkpoint(path="x", root="x", index_file=None, shards=(), tensors=tensors, config=None)


@st.composite
def _made(draw, stored):
    """Tensors that several moves make of the stored ones."""
    made = draw(st.sampled_from(stored))
    for move in draw(st.lists(st.sampled_from(["join", "stack", "slice", "turn", "halves", "flat"]), max_size=4)):
        dim = draw(st.integers(0, len(made.shape) - 1))
        if move == "join":
            made = pieces.concatenated([made, made, made], dim)
        elif move == "stack":
            made = pieces.concatenated([pieces.unsqueezed(made, 0), pieces.unsqueezed(made, 0)], 0)
        elif move == "slice" and made.shape[dim] > 1:
            made = pieces.sliced(made, dim, 1, made.shape[dim], draw(st.integers(1, 2)))
        elif move == "turn":
            made = pieces.permuted(made, draw(st.permutations(range(len(made.shape)))))
        elif move == "halves" and made.shape[dim] > 1:
            parts = [pieces.sliced(made, dim, start, made.shape[dim], 2) for start in (0, 1)]
            made = pieces.concatenated(parts, dim)
        elif move == "flat":
            made = pieces.reshaped(made, (-1, made.shape[-1]))
    other = draw(st.sampled_from(stored))
    if made.shape == other.shape:
        made = pieces.concatenated([made, other], draw(st.integers(0, len(made.shape) - 1)))
    return made


def _reference(tensor, dtype, data, wanted):
    values = torch.empty(tensor.shape, dtype=getattr(torch, dtype.torch_name))
    for piece in tensor.pieces:
        stored = torch.frombuffer(bytearray(data[piece.source]), dtype=values.dtype)
        for index in product(*map(range, piece.shape)):
            place = tuple(first + i for first, i in zip(piece.start, index, strict=True))
            values[place] = stored[piece.offset + sum(i * s for i, s in zip(index, piece.strides, strict=True))]
    return bytes(values.to(getattr(torch, wanted.torch_name)).view(-1).view(torch.uint8).numpy())


@given(st.data())
def test_windows_hold_what_the_pieces_make(tmp_path_factory, drawn):
    dtype = DTYPES[drawn.draw(st.sampled_from(["F32", "I16", "U8", "BF16"]))]
    can_cast = dtype.name in ("F32", "BF16")
    wanted = DTYPES[drawn.draw(st.sampled_from(["F32", "F16"]))] if can_cast and drawn.draw(st.booleans()) else dtype
    shape = tuple(drawn.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)))
    checkpoint = _checkpoint(shape, dtype)
    made = drawn.draw(_made([as_stored(each) for each in checkpoint.tensors.values()]))
    source = Conversion(tensors={"made": made}).of(checkpoint)["made"]
    tensor = OutputTensor(source=source, dtype=wanted)
    folder, data, readers = tmp_path_factory.getbasetemp(), {}, {}
    for name, stored in checkpoint.tensors.items():
        size = stored.span.num_bytes // dtype.alignment
        values = torch.arange(size).add(ord(name)).to(getattr(torch, dtype.torch_name))
        data[name] = bytes(values.view(torch.uint8).numpy())
        (folder / name).write_bytes(bytes(stored.span.start) + data[name])
        readers[name] = PositionalReader(folder / name)
    written, reader = bytearray(), WindowReader(_Sources(readers))
    while len(written) < tensor.num_bytes:
        units = (tensor.num_bytes - len(written)) // wanted.alignment
        window = bytearray(3 + wanted.alignment * drawn.draw(st.integers(1, units)))
        portion = Portion(tensor, len(written), len(written) + len(window) - 3, 3)
        reader.fill(memoryview(window), [portion])
        written += window[3:]
    for each in readers.values():
        each.close()
    assert written == _reference(made, dtype, data, wanted)


def test_pieces_without_gaps_in_memory_need_no_staging():
    checkpoint = _checkpoint((4, 6), DTYPES["F32"])
    a, b, c = map(as_stored, checkpoint.tensors.values())
    experts = pieces.concatenated(
        [pieces.unsqueezed(pieces.concatenated([a, b], 0), 0), pieces.unsqueezed(pieces.concatenated([b, c], 0), 0)], 0
    )
    source = Conversion(tensors={"made": experts}).of(checkpoint)["made"]
    assert isinstance(source, AssembledTensor)
    jobs = list(jobs_for([Portion(OutputTensor(source=source, dtype=source.dtype), 8, 300, 0)]))
    assert {job.delivery for job in jobs} == {Delivery.SCATTERED}
    assert [job.file for job in jobs] == ["a", "b", "b", "c"]
    assert sum(job.num_bytes for job in jobs) == 292
