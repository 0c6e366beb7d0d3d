"""Tensors that are assembled from pieces of stored ones, loaded by any schedule: block sizes, threads, casts."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import bigload
from bigload.checkpoint.model import Span, TensorInfo
from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.dtypes import DTYPES
from bigload.loading.buffers import fill_buffers
from bigload.loading.load import load_selected
from bigload.loading.progress import ignore_progress
from bigload.loading.scheduling.rows import row_of
from bigload.loading.scheduling.schedule import RequestedTensor, schedule_reads
from bigload.loading.selection import select
from bigload.loading.settings import settings
from bigload.loading.strategy.read_strategy import choose_strategy
from bigload.loading.tensors.views import as_tensors, dtype_of
from bigload.machine.threads.activities import Recorder

MOVES = {
    "stacked": lambda a, b: torch.stack([a, b]),
    "joined": lambda a, b: torch.cat([a, b], 0),
    "joined along columns": lambda a, b: torch.cat([a, b], 1),
    "columns": lambda a, _: a[:, 1:3],
    "transposed": lambda a, _: a.T,
    "rows by two": lambda a, b: torch.cat([a[::2], b[1::2]]),
    "columns by two": lambda a, _: torch.cat([a[:, ::2], a[:, 1::2]], 1),
    "experts": lambda a, b: torch.stack([torch.cat([a, b]), torch.cat([b, a])]).transpose(1, 2),
    "heads": lambda a, _: a.view(a.shape[0] // 2, 2, -1).transpose(0, 1).reshape(a.shape),
}


def loaded(checkpoint, tensors, *, dtype=None, block_bytes=1 << 20, threads=1):
    wanted = [RequestedTensor(tensor=each, dtype=dtype or each.dtype) for each in tensors.values()]
    recorder = Recorder(is_tracing=False)
    strategy = choose_strategy(checkpoint, wanted, settings(threads=threads), None, recorder)
    schedule = schedule_reads(wanted, block_bytes=block_bytes)
    return as_tensors(schedule, fill_buffers(checkpoint, schedule, strategy, recorder, ignore_progress))


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    """Matrices of several dtypes, `a` and `b` of each in files of their own."""
    folder = tmp_path_factory.mktemp("matrices")
    torch.manual_seed(0)
    values = {
        str(dtype): tuple(torch.randn(8, 12).mul(50).to(dtype) for _ in range(2))
        for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64)
    }
    for index, side in enumerate("ab"):
        save_file({f"{side}.{name}": pair[index] for name, pair in values.items()}, folder / f"{side}.safetensors")
    names = {f"{side}.{name}": f"{side}.safetensors" for side in "ab" for name in values}
    (folder / "model.safetensors.index.json").write_text(
        '{"weight_map": {' + ", ".join(f'"{name}": "{file}"' for name, file in names.items()) + "}}"
    )
    return bigload.open_checkpoint(folder), values


@given(st.data())
def test_assembled_tensors_are_what_torch_makes_of_the_stored_ones(matrices, data):
    checkpoint, values = matrices
    made, expected = {}, {}
    for name, (a, b) in values.items():
        for kind in data.draw(st.lists(st.sampled_from(list(MOVES)), unique=True)):
            stored = [RecordedTensor(as_stored(checkpoint.tensors[f"{side}.{name}"]), a.dtype) for side in "ab"]
            made[f"{kind} {name}"] = MOVES[kind](*stored).origin
            expected[f"{kind} {name}"] = MOVES[kind](a, b)
    tensors = Conversion(tensors=made).of(checkpoint)
    block_bytes = data.draw(st.sampled_from([8, 40, 100, 1 << 20]))
    found = loaded(checkpoint, tensors, block_bytes=block_bytes, threads=data.draw(st.integers(1, 2)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert found[name].is_contiguous()


@pytest.mark.parametrize("kind", MOVES)
def test_a_cast_is_made_on_the_way(matrices, kind):
    checkpoint, values = matrices
    a, b = values["torch.float32"]
    stored = [RecordedTensor(as_stored(checkpoint.tensors[f"{side}.torch.float32"]), a.dtype) for side in "ab"]
    tensors = Conversion(tensors={"made": MOVES[kind](*stored).origin}).of(checkpoint)
    found = loaded(checkpoint, tensors, dtype=dtype_of(torch.bfloat16), block_bytes=64)
    assert torch.equal(found["made"], MOVES[kind](a, b).to(torch.bfloat16))


def test_each_byte_is_read_once_where_pieces_are_contiguous(matrices):
    checkpoint, values = matrices
    a, _ = values["torch.float32"]
    stored = [RecordedTensor(as_stored(checkpoint.tensors[f"{side}.torch.float32"]), a.dtype) for side in "ab"]
    tensors = Conversion(tensors={"made": torch.stack(stored).origin}).of(checkpoint)
    wanted = [RequestedTensor(tensor=each, dtype=each.dtype) for each in tensors.values()]
    schedule = schedule_reads(wanted)
    assert schedule.num_bytes == tensors["made"].num_bytes == 2 * math.prod(a.shape) * 4
    assert len(schedule.jobs) == 2


@given(st.data())
def test_a_slice_is_made_of_what_the_pieces_have_of_it(matrices, data):
    checkpoint, values = matrices
    kind = data.draw(st.sampled_from(list(MOVES)))
    stored = [RecordedTensor(as_stored(checkpoint.tensors[f"{side}.torch.float32"]), torch.float32) for side in "ab"]
    conversion = Conversion(tensors={"made": MOVES[kind](*stored).origin})
    view = CheckpointView(checkpoint=checkpoint, tensors=conversion.of(checkpoint), conversion=conversion)
    expected = MOVES[kind](*values["torch.float32"])
    dim = data.draw(st.integers(0, expected.dim() - 1))
    start = data.draw(st.integers(0, expected.shape[dim]))
    stop = data.draw(st.integers(start, expected.shape[dim]))
    selection = select(view, slices={"made": bigload.Slice(dim, start, stop)})
    found = load_selected(checkpoint, selection)["made"]
    assert torch.equal(found, expected.narrow(dim, start, stop - start))


@pytest.mark.parametrize("kind", MOVES)
def test_rows_are_those_of_the_tensor_and_read_nothing_else(matrices, kind):
    checkpoint, values = matrices
    a, b = values["torch.bfloat16"]
    stored = [RecordedTensor(as_stored(checkpoint.tensors[f"{side}.torch.bfloat16"]), a.dtype) for side in "ab"]
    whole = Conversion(tensors={"made": MOVES[kind](*stored).origin}).of(checkpoint)["made"]
    expected = MOVES[kind](a, b)
    rows = [row_of(whole, index) for index in range(len(expected))]
    found = loaded(checkpoint, {row.name: row for row in rows})
    assert all(torch.equal(found[row.name], value) for row, value in zip(rows, expected, strict=True))
    assert all(row.num_bytes == expected[0].nbytes for row in rows)
    assert (kind in ("stacked", "joined")) == all(isinstance(row, TensorInfo) and not row.strides for row in rows)
    for index in (-1, len(expected)):
        with pytest.raises(ValueError, match="row"):
            row_of(whole, index)


def test_rows_of_packed_elements_begin_at_whole_bytes():
    def packed(*shape):
        return TensorInfo("w", DTYPES["F4"], shape, Span("f", 100, 100 + math.prod(shape) // 2))

    row = row_of(packed(4, 2, 6), 2)
    assert (row.shape, row.span) == ((2, 6), Span("f", 112, 118))
    with pytest.raises(ValueError, match="cuts through"):
        row_of(packed(4, 3), 1)
