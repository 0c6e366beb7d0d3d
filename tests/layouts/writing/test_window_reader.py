"""Any bytes of what is written of a tensor, in any windows, are those that torch computes for the whole of it."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.checkpoint.byte_source import PositionalReader
from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.errors import ReadError
from bigload.layouts.output import OutputTensor
from bigload.layouts.writing.window_reader import Portion, WindowReader
from bigload.loading.scheduling.slices import Slice
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import MIB
from builders import open_descriptors, write_shard

torch = pytest.importorskip("torch")
host_staging = pytest.importorskip("bigload.loading.staging.cpu_stager")
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


def _windows(tensors, choose):
    """Cut the written bytes at multiples of element sizes, now and then, and all tensors at their ends."""
    window, position = [], 0
    for tensor in tensors:
        start = 0
        while start < tensor.num_bytes:
            units = (tensor.num_bytes - start) // tensor.dtype.alignment
            stop = start + choose.choice([units, choose.randint(1, units)]) * tensor.dtype.alignment
            window.append(Portion(tensor, start, stop, position))
            position += stop - start
            start = stop
            if choose.random() < 0.4:
                yield window, position
                window, position = [], 0
    if window:
        yield window, position


@given(_outputs())
def test_windows_hold_what_torch_makes_of_the_tensors(tmp_path_factory, drawn):
    tensors, data, choose = drawn
    path = tmp_path_factory.getbasetemp() / "source"
    path.write_bytes(data)
    written = bytearray()
    with PositionalReader(path) as source:
        filler = WindowReader(_Sources(source))
        for portions, num_bytes in _windows(tensors, choose):
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


def _plain(dtype, shape, start=0, strides=None, num_elements=None):
    num_bytes = (prod(shape) if num_elements is None else num_elements) * DTYPES[dtype].bits // 8
    return TensorInfo(f"{dtype}.{start}", DTYPES[dtype], shape, Span("f", start, start + num_bytes), strides)


def _whole(tensor, at=0):
    return Portion(tensor, 0, tensor.num_bytes, at)


def _output(source, dtype=None, parts=()):
    return OutputTensor(source=source, dtype=DTYPES[dtype] if dtype else source.dtype, parts=parts)


class _Sources:
    """One file for all that is read."""

    def __init__(self, source):
        self.past_cache = self.through_cache = lambda file: nullcontext(source)


class _Source:
    """A file in memory, and how it was read."""

    def __init__(self, data):
        self.data = data
        self.reads = []

    def read_into(self, buffers, offset):
        start = offset
        for buffer in buffers:
            assert offset + buffer.nbytes <= len(self.data)
            buffer[:] = self.data[offset : offset + buffer.nbytes]
            offset += buffer.nbytes
        self.reads.append((start, offset, len(buffers)))

    def close(self):
        pass


def _filled(source, portions):
    window = bytearray(sum(portion.stop - portion.start for portion in portions))
    filler = WindowReader(_Sources(source))
    filler.fill(memoryview(window), portions)
    return bytes(window), filler


def test_neighbours_are_one_read_across_tensors_and_small_gaps():
    source = _Source(bytes(range(200)))
    tensors = [_output(_plain("U8", (10,), start)) for start in (0, 10, 25)]
    window, _ = _filled(source, [_whole(tensor, at=10 * number) for number, tensor in enumerate(tensors)])
    assert window == source.data[:20] + source.data[25:35]
    assert source.reads == [(0, 35, 4)]


def test_parts_that_follow_each_other_in_the_file_are_one_buffer():
    source = _Source(bytes(range(40)))
    tensor = _output(_plain("U8", (4, 10)), parts=(Slice(0, 1, 2), Slice(0, 2, 4)))
    assert _filled(source, [_whole(tensor)])[0] == source.data[10:]
    assert source.reads == [(10, 40, 1)]


def test_columns_are_as_few_calls_as_the_system_takes_buffers():
    num_rows, limit = 3000, os.sysconf("SC_IOV_MAX")
    source = _Source(random.Random(1).randbytes(num_rows * 64))
    tensor = _output(_plain("U8", (num_rows, 64)), parts=(Slice(1, 16, 32),))
    window, _ = _filled(source, [_whole(tensor)])
    assert window == b"".join(source.data[row * 64 + 16 : row * 64 + 32] for row in range(num_rows))
    assert max(buffers for _, _, buffers in source.reads) <= limit
    assert len(source.reads) == -(-(2 * num_rows - 1) // (limit - 1))


def test_columns_far_apart_are_read_without_what_lies_between():
    width = 300_000
    source = _Source(bytes(3 * width))
    _filled(source, [_whole(_output(_plain("U8", (3, width)), parts=(Slice(1, 0, 8),)))])
    assert [(start, stop) for start, stop, _ in source.reads] == [(row * width, row * width + 8) for row in range(3)]


def test_nothing_outside_of_the_portions_is_written():
    source = _Source(bytes([7] * 64))
    window = bytearray(32)
    columns = _output(_plain("U8", (8, 8)), parts=(Slice(1, 2, 4),))
    WindowReader(_Sources(source)).fill(memoryview(window), [Portion(columns, 3, 11, at=5)])
    assert window == bytes(5) + bytes([7] * 8) + bytes(19)


def test_casts_are_read_in_blocks_that_stay_in_a_cache():
    source = _Source(bytes(8 * MIB))
    tensor = _output(_plain("F32", (2 * MIB,)), "BF16")
    _filled(source, [_whole(tensor)])
    assert {stop - start for start, stop, _ in source.reads} == {2 * MIB}


def test_a_transposed_matrix_is_read_once_for_each_window_at_most():
    rows, columns = 512, 4096
    data = random.Random(2).randbytes(rows * columns * 2)
    source = _Source(data)
    tensor = _output(_plain("I16", (columns, rows), strides=(1, columns), num_elements=rows * columns))
    window, _ = _filled(source, [Portion(tensor, 0, tensor.num_bytes // 8, 0)])
    assert window == _reference(data, tensor)[: tensor.num_bytes // 8]
    assert sum(stop - start for start, stop, _ in source.reads) <= len(data)


@pytest.mark.parametrize(
    ("stored", "wanted", "strides", "limit"),
    [
        ("F32", "BF16", None, 4 * MIB),
        ("F16", "BF16", None, 4 * MIB),
        ("BF16", "F32", None, 4 * MIB),
        ("F16", "BF16", (1, 4096), 18 * MIB),
        ("F64", "F16", (2, 8192), 18 * MIB),
    ],
)
@pytest.mark.sample(2)
def test_memory_does_not_grow_with_the_window(monkeypatch, stored, wanted, strides, limit):
    taken = []
    monkeypatch.setattr(host_staging, "allocate", lambda size: taken.append(size) or allocate(size))
    num_elements = 4096 * 2048 if strides is None else 4095 * strides[0] + 2047 * strides[1] + 1
    info = _plain(stored, (4096, 2048), strides=strides, num_elements=num_elements)
    _filled(_Zeros(), [_whole(_output(info, wanted))])
    assert 0 < sum(taken) <= limit


class _Zeros(_Source):
    """A file of nothing, as long as one likes."""

    def __init__(self):
        super().__init__(b"")

    def read_into(self, buffers, offset):
        for buffer in buffers:
            buffer[:] = bytes(buffer.nbytes)


@pytest.mark.parametrize(
    ("stored", "wanted", "values", "count"),
    [
        ("F32", "F16", [1.0, 65504.0, 65519.0, -65519.0], 0),
        ("F32", "F16", [65520.0, -1e9, 3.0, math.inf, -math.inf, math.nan], 2),
        ("BF16", "F16", [65536.0, 1.0], 1),
        ("F32", "BF16", [3.4e38, 3e38, math.nan], 1),
        ("F64", "F32", [1e39, 1e38], 1),
        ("F32", "F8_E4M3", [448.0, 1000.0, math.nan], 1),
        ("F8_E5M2", "F8_E4M3", [448.0, 1024.0], 1),
        ("F16", "BF16", [65504.0], 0),
        ("BF16", "F32", [3e38], 0),
    ],
)
def test_values_beyond_the_new_dtype_are_counted_by_tensor(stored, wanted, values, count):
    data = torch.tensor(values, dtype=torch.float64).to(getattr(torch, DTYPES[stored].torch_name))
    source = _Source(bytes(data.view(torch.uint8).numpy()))
    tensor = _output(_plain(stored, (len(values),)), wanted)
    view = _output(_plain(stored, (len(values), 1), strides=(1, 9), num_elements=len(values)), wanted)
    for each in (tensor, view):
        assert _filled(source, [_whole(each)])[1].overflows == ({each.name: count} if count else {})


def test_a_file_that_ends_early_is_an_error(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(bytes(100))
    with PositionalReader(path) as source, pytest.raises(ReadError, match="too early"):
        _filled(source, [_whole(_output(_plain("U8", (101,))))])


def test_threads_share_a_filler_without_threads_or_descriptors_of_its_own(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(random.Random(3).randbytes(8 * MIB))
    tensor = _output(_plain("BF16", (4 * MIB,)), "F32")
    step = MIB
    windows = [bytearray(step) for _ in range(0, tensor.num_bytes, step)]
    tasks = []
    with PositionalReader(path) as source:
        filler = WindowReader(_Sources(source))
        before = open_descriptors()

        def work(number):
            filler.fill(memoryview(windows[number]), [Portion(tensor, number * step, (number + 1) * step, 0)])
            tasks.append(_num_tasks())

        others = _num_tasks()
        run_jobs(work, range(len(windows)), threads=3)
        assert open_descriptors() == before
    assert max(tasks) <= others + 3  # torch has none of its own in this
    assert b"".join(windows) == _reference(path.read_bytes(), tensor)


def _num_tasks():
    return len(list(Path("/proc/self/task").iterdir()))


_WITHOUT_TORCH = """
import sys
from bigload.checkpoint.source import open_checkpoint
from bigload.layouts.dtype_rules import config_with_dtype, dtype_rule
from bigload.layouts.output import OutputTensor
from bigload.layouts.writing.source_files import SourceFiles
from bigload.layouts.writing.window_reader import WindowReader, Portion
from bigload.loading.scheduling.slices import Slice

checkpoint = open_checkpoint(sys.argv[1])
info = checkpoint.tensors["w"]
tensor = OutputTensor(source=info, dtype=dtype_rule("bf16")(info), parts=(Slice(1, 0, 2), Slice(1, 4, 6)))
window = bytearray(tensor.num_bytes)
with SourceFiles(checkpoint) as sources:
    WindowReader(sources).fill(memoryview(window), [Portion(tensor, 0, tensor.num_bytes, 0)])
config_with_dtype(b"{}", tensor.dtype)
stored = (checkpoint.root / info.span.file).read_bytes()[info.span.start :]
assert window[4:8] == stored[8:12], window
assert not {"torch", "numpy"} & set(sys.modules)
"""


def test_nothing_of_torch_is_imported_where_nothing_is_computed(tmp_path):
    path = write_shard(tmp_path / "model.safetensors", {"w": ("BF16", [4, 8])})
    subprocess.run([sys.executable, "-c", _WITHOUT_TORCH, path], check=True)
