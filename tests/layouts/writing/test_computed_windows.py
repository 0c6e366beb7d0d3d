"""Windows of tensors that are computed from stored ones hold the elements in their places, however they are cut."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.model import Span, TensorInfo
from bigload.conversion import strided_pieces as pieces
from bigload.conversion.computed_tensor import ComputedTensor, Operand, OperandRows, num_rows
from bigload.conversion.conversion import Conversion
from bigload.dtypes import DTYPES
from bigload.layouts.output import OutputTensor
from bigload.layouts.writing.window_reader import Portion, WindowReader
from bigload.loading.scheduling.slices import Slice
from bigload.loading.staging import row_computer

torch = pytest.importorskip("torch")


@dataclass(frozen=True)
class _Sum:
    """Twice one tensor, and the first row of another: which rows are asked for is checked."""

    twice: Operand
    bias: Operand
    row_multiple: int = 1

    @property
    def operands(self):
        return self.twice, self.bias

    def rows_for(self, start, stop):
        assert start % self.row_multiple == 0
        assert stop % self.row_multiple == 0 or stop == num_rows(self.twice)
        return OperandRows(self.twice, start, stop), OperandRows(self.bias, 0, 1, is_recent=True)

    def compute(self, start, stop, operands, scratch):
        twice, bias = operands
        assert twice.shape[0] == stop - start
        return torch.mul(twice, 2, out=scratch("result", tuple(twice.shape), torch.float32)).add_(bias)


class _Sources:
    def __init__(self, reader):
        self._reader = reader

    def past_cache(self, file):
        return nullcontext(self._reader)

    through_cache = past_cache


@st.composite
def _shapes(draw):
    return tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))


@given(
    shape=_shapes(),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40)),
    written=st.sampled_from(["F32", "BF16"]),
    data=st.data(),
)
def test_any_window_of_a_computed_tensor_is_right(tmp_path_factory, shape, sizes, written, data):
    multiple, step = sizes
    file = tmp_path_factory.getbasetemp() / "stored"
    count = torch.Size(shape).numel()
    values = torch.arange(2 * count, dtype=torch.bfloat16)
    file.write_bytes(values.view(torch.uint8).numpy().tobytes())
    stored = TensorInfo("a", DTYPES["BF16"], shape, Span("a", 0, 2 * count))
    other = TensorInfo("b", DTYPES["BF16"], shape, Span("a", 2 * count, 4 * count))
    first = values[:count].view(shape)
    kind = data.draw(st.sampled_from(["stored", "computed", *["assembled"] * (len(shape) > 1)]))
    operand = stored
    expected = first.float()
    if kind == "assembled":
        made = pieces.concatenated([pieces.PiecedTensor.of("b", shape), pieces.PiecedTensor.of("a", shape)], 0)
        operand = Conversion(tensors={"c": made}).made_of({"a": stored, "b": other})["c"]
        expected = torch.cat([values[count:].view(shape), first]).float()
    if kind == "computed":
        operand = ComputedTensor("c", DTYPES["F32"], shape, _Sum(stored, other, multiple))
        expected = first.float() * 2 + values[count:].view(-1, shape[-1])[0].float()
    expected = expected * 2 + values[count:].view(-1, shape[-1])[0].float()
    tensor = ComputedTensor("t", DTYPES["BF16"], operand.shape, _Sum(operand, other, multiple))
    parts = ()
    if data.draw(st.booleans()):
        dim = data.draw(st.integers(0, len(tensor.shape) - 1))
        edges = sorted(data.draw(st.lists(st.integers(0, tensor.shape[dim]), min_size=4, max_size=4)))
        if edges[0] < edges[1]:
            parts = (Slice(dim, edges[0], edges[1]), Slice(dim, edges[2], edges[3]))
            expected = torch.cat([expected.narrow(dim, p.start, p.stop - p.start) for p in parts], dim)
    output = OutputTensor(source=tensor, dtype=DTYPES[written], parts=parts)
    assert output.shape == tuple(expected.shape)
    whole = expected.to(torch.bfloat16 if written == "BF16" else torch.float32).contiguous()
    width = whole.element_size()
    edges = sorted({0, whole.numel(), *data.draw(st.lists(st.integers(0, whole.numel()), max_size=3))})
    with PositionalReader(file) as reader, pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_computer, "STEP_ELEMENTS", step)
        windows = WindowReader(_Sources(reader))
        for begin, end in pairwise(edges):
            memory = bytearray((end - begin) * width + 3)
            windows.fill(memoryview(memory), [Portion(output, begin * width, end * width, 3)])
            found = torch.frombuffer(memory[3:], dtype=whole.dtype)
            assert torch.equal(found, whole.flatten()[begin:end])


@dataclass(frozen=True)
class _Turned:
    """A transposed matrix, read as a view whose columns are the rows wanted."""

    matrix: TensorInfo
    row_multiple: int = 2

    @property
    def operands(self):
        return (self.matrix,)

    def rows_for(self, start, stop):
        rows, columns = self.matrix.shape
        begin, end = self.matrix.span.start + 4 * start, self.matrix.span.start + 4 * ((rows - 1) * columns + stop)
        view = TensorInfo("v", self.matrix.dtype, (rows, stop - start), Span("a", begin, end), (columns, 1))
        return (OperandRows.all_of(view),)

    def compute(self, start, stop, operands, scratch):
        return operands[0].T


def test_views_are_read_whole(tmp_path):
    values = torch.arange(35, dtype=torch.float32).view(5, 7)
    (tmp_path / "a").write_bytes(values.numpy().tobytes())
    stored = TensorInfo("a", DTYPES["F32"], (5, 7), Span("a", 0, 140))
    output = OutputTensor(source=ComputedTensor("t", DTYPES["F32"], (7, 5), _Turned(stored)), dtype=DTYPES["F32"])
    with PositionalReader(tmp_path / "a") as reader:
        memory = bytearray(80)
        WindowReader(_Sources(reader)).fill(memoryview(memory), [Portion(output, 16, 96, 0)])
    assert torch.equal(torch.frombuffer(memory, dtype=torch.float32), values.T.flatten()[4:24])
