import gc
import weakref

import pytest
import torch

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.errors import OptionError, UnsupportedDTypeError
from bigload.loading.scheduling.read_jobs import ALIGNMENT
from bigload.loading.scheduling.schedule import RequestedTensor, schedule_reads
from bigload.loading.tensors.views import as_tensors, check_dtypes, parsed_dtype, torch_dtype, torch_shape
from bigload.machine.memory.huge_pages import allocate
from builders import num_bytes_of

SIX_BITS = ("F6_E2M3", "F6_E3M2")
NEWER = {"F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2"}  # torch 2.6 has neither


def info(dtype, shape, *, name="a", start=8):
    span = Span("file", start, start + num_bytes_of(dtype, shape))
    return RequestedTensor(tensor=TensorInfo(name, DTYPES[dtype], tuple(shape), span), dtype=DTYPES[dtype])


def memory_of(schedule):
    return [allocate(buffer.num_bytes) for buffer in schedule.buffers]


@pytest.mark.parametrize("name", DTYPES)
def test_torchs_element_is_as_wide_as_the_formats(name):
    found = torch_dtype(DTYPES[name])
    if name in SIX_BITS or (name in NEWER and not hasattr(torch, NEWER[name])):
        assert found is None
    else:
        assert found.itemsize * 8 == DTYPES[name].bits * (2 if name == "F4" else 1)


def test_a_dtype_that_this_torch_lacks_has_no_counterpart(monkeypatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    assert torch_dtype(DTYPES["F8_E8M0"]) is None
    with pytest.raises(UnsupportedDTypeError, match="F8_E8M0"):
        check_dtypes([info("F8_E8M0", [2])])


def test_packed_four_bit_elements_count_in_pairs():
    assert torch_shape(DTYPES["F4"], (3, 8)) == (3, 4)
    assert torch_shape(DTYPES["BF16"], (3, 8)) == (3, 8)
    assert torch_shape(DTYPES["F32"], ()) == ()


@pytest.mark.parametrize("shape", [[2, 3], [4, 1]])
def test_four_bit_rows_of_odd_length_are_refused(shape):
    with pytest.raises(UnsupportedDTypeError) as caught:
        check_dtypes([info("F4", shape, name="odd")])
    assert "odd" in str(caught.value)


@pytest.mark.parametrize("dtype", SIX_BITS)
def test_six_bit_types_are_refused_with_every_tensor_named(dtype):
    tensors = [info("F32", [2], name="fine"), info(dtype, [4], name="x"), info(dtype, [8], name="y")]
    with pytest.raises(UnsupportedDTypeError, match=f"no dtype for {dtype}, the type of 2 tensors") as caught:
        check_dtypes(tensors)
    assert (caught.value.dtype, caught.value.details) == (dtype, ("x", "y"))
    assert isinstance(caught.value, TypeError)


def test_tensors_are_views_that_share_the_buffer():
    schedule = schedule_reads([info("U8", [3])])
    buffers = memory_of(schedule)
    tensor = as_tensors(schedule, buffers)["a"]
    buffers[0][0:3] = bytes([7, 8, 9])
    assert tensor.tolist() == [7, 8, 9]
    tensor[0] = 1
    assert buffers[0][0:1] == b"\1"


def test_tensors_are_aligned_whatever_their_place_in_the_file():
    schedule = schedule_reads([info("U8", [3], name="odd"), info("F64", [2], name="wide", start=11)])
    tensors = as_tensors(schedule, memory_of(schedule))
    assert [tensor.data_ptr() % ALIGNMENT for tensor in tensors.values()] == [0, 0]


def test_the_memory_lives_as_long_as_the_last_of_its_tensors():
    schedule = schedule_reads([info("U8", [3], name="a"), info("U8", [3], name="b", start=11)])
    buffers = memory_of(schedule)
    memory = weakref.ref(buffers[0])
    tensors = as_tensors(schedule, buffers)
    del buffers, tensors["a"]
    gc.collect()
    assert memory() is not None
    tensors["b"].fill_(5)
    tensors.clear()
    gc.collect()
    assert memory() is None


def test_every_tensor_has_a_storage_of_its_own_so_saving_one_does_not_save_its_neighbours():
    schedule = schedule_reads([info("U8", [3], name="a"), info("U8", [5], name="b", start=11)])
    tensors = as_tensors(schedule, memory_of(schedule))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors.values()] == [3, 5]


@pytest.mark.parametrize("text", ["bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_goes_by_any_of_its_names(text):
    assert parsed_dtype(text) == DTYPES["BF16"]


def test_a_dtype_that_nobody_knows_is_told():
    assert parsed_dtype(None) is None
    with pytest.raises(OptionError, match='dtype is "float17"; expected the name of a dtype'):
        parsed_dtype("float17")
