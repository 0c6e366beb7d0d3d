"""Any bytes of what is written of a tensor, in any windows, are those that torch computes for the whole of it."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.layouts.filling import Filler, Portion
from bigload.layouts.output_files import OutputTensor
from bigload.loading.bytesource import PositionalReader
from bigload.loading.slices import Slice

torch = pytest.importorskip("torch")
_FLOATS = ["F32", "F16", "BF16", "F64", "F8_E5M2"]
_OTHERS = ["U8", "I64", "I16", "BOOL"]


def _reference(data: bytes, tensor: OutputTensor) -> bytes:
    info = tensor.source
    raw = torch.frombuffer(bytearray(data[info.span.start : info.span.stop] or b"\0" * 8), dtype=torch.uint8)
    raw = raw[: info.span.num_bytes].clone()
    moved_as = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[info.dtype.bits]
    values = raw.view(getattr(torch, info.dtype.torch_name) if tensor.is_cast else moved_as)
    values = values.view(info.shape) if info.strides is None else values.as_strided(info.shape, info.strides)
    if tensor.parts:
        chosen = [values.narrow(part.dim, part.start, part.stop - part.start) for part in tensor.parts]
        values = torch.cat(chosen, dim=tensor.parts[0].dim)
    wanted = getattr(torch, tensor.dtype.torch_name) if tensor.is_cast else moved_as
    return bytes(torch.empty(values.shape, dtype=wanted).copy_(values).view(-1).view(torch.uint8).numpy())


@st.composite
def _output_tensors(draw, start):
    stored = DTYPES[draw(st.sampled_from(_FLOATS + _OTHERS))]
    wanted = DTYPES[draw(st.sampled_from(_FLOATS))] if stored.name in _FLOATS and draw(st.booleans()) else stored
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    parts = ()
    if shape and draw(st.booleans()):
        dim = draw(st.integers(0, len(shape) - 1))
        edges = st.tuples(st.integers(0, shape[dim]), st.integers(0, shape[dim])).map(sorted)
        parts = tuple(Slice(dim, low, high) for low, high in draw(st.lists(edges, min_size=1, max_size=3)))
    strides, num_elements = None, prod(shape)
    if draw(st.booleans()):
        strides = tuple(draw(st.sampled_from([0, 1, 1, 2, 3, 7, 20])) for _ in shape)
        num_elements = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    span = Span("f", start, start + num_elements * stored.bits // 8)
    source = TensorInfo(f"tensor.{start}", stored, shape, span, strides)
    return OutputTensor(source=source, dtype=wanted, parts=parts)


@st.composite
def _outputs(draw):
    """Tensors in one source, gaps and odd offsets between them, and where their written forms are cut into windows."""
    tensors, position = [], 0
    for _ in range(draw(st.integers(1, 4))):
        position += draw(st.sampled_from([0, 0, 1, 8, 500]))
        tensors.append(draw(_output_tensors(position)))
        position = tensors[-1].source.span.stop
    return draw(st.permutations(tensors)), draw(st.binary(min_size=position, max_size=position)), draw(st.randoms())


def _windows(tensors, random):
    """Cut the written bytes at multiples of element sizes, now and then, and all tensors at their ends."""
    window, position = [], 0
    for tensor in tensors:
        start = 0
        while start < tensor.num_bytes:
            units = (tensor.num_bytes - start) // tensor.dtype.alignment
            stop = start + random.choice([units, random.randint(1, units)]) * tensor.dtype.alignment
            window.append(Portion(tensor, start, stop, position))
            position += stop - start
            start = stop
            if random.random() < 0.4:
                yield window, position
                window, position = [], 0
    if window:
        yield window, position


@given(_outputs())
def test_windows_hold_what_torch_makes_of_the_tensors(tmp_path_factory, drawn):
    tensors, data, random = drawn
    path = tmp_path_factory.getbasetemp() / "source"
    path.write_bytes(data)
    written = bytearray()
    with PositionalReader(path) as source:
        filler = Filler({"f": source})
        for portions, num_bytes in _windows(tensors, random):
            window = bytearray(num_bytes)
            filler.fill(memoryview(window), portions)
            written += window
    expected = b"".join(_reference(data, tensor) for tensor in tensors)
    assert _with_one_nan(written, tensors) == _with_one_nan(expected, tensors)


def _with_one_nan(written, tensors):
    """What is no number may be written in several ways, and torch is not always of one mind."""
    normal, position = b"", 0
    for tensor in tensors:
        part = bytearray(written[position : position + tensor.num_bytes])
        position += tensor.num_bytes
        if tensor.is_cast and part:
            values = torch.frombuffer(part, dtype=getattr(torch, tensor.dtype.torch_name))
            is_nan = values.float().isnan().repeat_interleave(tensor.dtype.alignment)
            torch.frombuffer(part, dtype=torch.uint8)[is_nan] = 0xFF
        normal += part
    return normal + bytes(written[position:])
