from enum import Enum

import pytest
import torch
from torch import nn

import bigload


class Bits(Enum):
    """What quantisers say instead of a dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class Masked(nn.Module):
    """A saved buffer beside an unsaved one of the same last name, one level down."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.empty(4))
        self.register_buffer("cache", torch.empty(2), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("mask", torch.empty(8), persistent=False)


def net():
    """A linear layer of 3 to 4, a batch norm of 4 and a linear layer of 4 to 5, in 32 bits: 64 + 72 + 100 bytes."""
    with torch.device("meta"):
        return nn.ModuleDict({"first": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "last": nn.Linear(4, 5)})


def names_of(tensors):
    return [name for name, _ in tensors]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, 4),
        (torch.bfloat16, 2),
        (torch.complex64, 8),
        (torch.int64, 8),
        (torch.float8_e4m3fn, 1),
        *([(torch.float8_e8m0fnu, 1)] if hasattr(torch, "float8_e8m0fnu") else []),  # torch 2.6 has none
        (torch.qint8, 1),
        (torch.bool, 1 / 8),
        ("float16", 2),
        ("torch.float64", 8),
        (Bits.FP8, 1),
        (Bits.INT4, 1 / 2),
        ("int2", 1 / 4),
    ],
    ids=str,
)
def test_the_size_of_an_element(dtype, size):
    assert bigload.dtype_byte_size(dtype) == size


@pytest.mark.parametrize("dtype", ["float17", "nn", 4])
def test_what_is_no_dtype_is_refused(dtype):
    with pytest.raises(ValueError, match="is not a dtype"):
        bigload.dtype_byte_size(dtype)


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [("0MB", 0), ("100MB", 10**8), ("2GiB", 2**31), ("1.5GB", 1_500_000_000), ("4096", 4096), (500, 500), (2.5, 2)],
)
def test_sizes_in_words_and_numbers(size, num_bytes):
    assert bigload.convert_file_size_to_int(size) == num_bytes


@pytest.mark.parametrize(
    "size", ["5MBB", "5k0MB", "-1GB", "1gb", "1Gb", -1, -0.5, float("nan"), float("inf"), True, None]
)
def test_a_size_that_is_none_or_has_two_readings_is_refused(size):
    with pytest.raises(ValueError, match=r"size|reading|bits|unit"):
        bigload.convert_file_size_to_int(size)


def test_sizes_of_modules_and_tensors():
    assert bigload.compute_module_sizes(net()) == {
        "": 236,
        "first": 64,
        "first.weight": 48,
        "first.bias": 16,
        "norm": 72,
        "norm.weight": 16,
        "norm.bias": 16,
        "norm.running_mean": 16,
        "norm.running_var": 16,
        "norm.num_batches_tracked": 8,
        "last": 100,
        "last.weight": 80,
        "last.bias": 20,
    }


def test_a_load_dtype_shrinks_floats_and_nothing_else():
    sizes = bigload.compute_module_sizes(net(), dtype="float16")
    assert sizes["first.weight"] == 24
    assert sizes["norm.num_batches_tracked"] == 8
    assert bigload.compute_module_sizes(net().half(), dtype=torch.float32)["first.weight"] == 24


def test_a_dtype_of_half_a_byte_makes_halves():
    with torch.device("meta"):
        model = nn.Linear(3, 1)
    sizes = bigload.compute_module_sizes(model, dtype=Bits.INT4)
    assert (sizes["weight"], sizes["bias"], sizes[""]) == (1.5, 0.5, 2.0)


def test_a_dtype_for_one_tensor_goes_before_the_load_dtype():
    sizes = bigload.compute_module_sizes(net(), dtype=torch.float16, special_dtypes={"last.weight": torch.float64})
    assert (sizes["last.weight"], sizes["last.bias"]) == (160, 10)


def test_a_shared_tensor_counts_once_under_its_first_name():
    model = net()
    model["last"].bias = model["norm"].bias
    sizes = bigload.compute_module_sizes(model)
    assert (sizes[""], sizes["norm"], sizes["last"]) == (236 - 20, 72, 80)
    assert "last.bias" not in sizes


def test_a_model_without_tensors_weighs_nothing():
    assert bigload.compute_module_sizes(nn.Identity()) == {"": 0}


def test_buffers_alone():
    assert bigload.compute_module_total_buffer_size(net()) == 40
    assert bigload.compute_module_sizes(net(), buffers_only=True)["norm"] == 40


def test_leaves_of_sizes_are_tensors_and_without_them_modules():
    sizes = bigload.compute_module_sizes(net())
    leaves = bigload.get_module_leaves(sizes)
    assert len(leaves) == 9
    assert bigload.get_module_leaves(name for name in sizes if name not in leaves) == ["first", "norm", "last"]


def test_the_largest_layer_and_every_layer_of_its_size():
    sizes = {"a": 5, "a.x": 2, "a.y": 3, "b": 3, "c": 1}
    pair = nn.ModuleDict({"x": nn.Identity(), "y": nn.Identity()})
    modules = [("a", pair), ("b", nn.Identity()), ("c", nn.Identity())]
    assert bigload.get_max_layer_size(modules, sizes, []) == (3, ["a.y", "b"])
    assert bigload.get_max_layer_size(modules, sizes, ["ModuleDict"]) == (5, ["a"])
    assert bigload.get_max_layer_size([], sizes, []) == (0, [])


def test_total_and_largest_layer_of_a_model_with_and_without_blocks_of_its_own():
    model = net()
    assert bigload.calculate_maximum_sizes(model) == (236, (100, ["last"]))
    outer = nn.Sequential(model)
    outer._no_split_modules = ["ModuleDict"]
    assert bigload.calculate_maximum_sizes(outer) == (236, (236, ["0"]))


def test_tensors_of_a_module_parameters_first():
    model = net()
    assert names_of(bigload.named_module_tensors(model)) == []
    assert names_of(bigload.named_module_tensors(model["norm"])) == [
        "weight",
        "bias",
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]
    assert names_of(bigload.named_module_tensors(model["norm"], include_buffers=False)) == ["weight", "bias"]
    assert names_of(bigload.named_module_tensors(model, recurse=True))[-3] == "norm.running_mean"


def test_unsaved_buffers_are_told_by_full_name_so_that_a_saved_one_of_the_same_last_name_stays():
    model = Masked()
    kept = bigload.named_module_tensors(model, recurse=True, remove_non_persistent=True)
    assert names_of(kept) == list(model.state_dict()) == ["mask"]


def test_names_of_unsaved_buffers():
    model = Masked()
    assert bigload.get_non_persistent_buffers(model) == {"cache"}
    assert bigload.get_non_persistent_buffers(model, recurse=True) == {"cache", "mask"}
    assert bigload.get_non_persistent_buffers(model, recurse=True, fqns=True) == {"cache", "inner.mask"}
    assert model._non_persistent_buffers_set == {"cache"}


def test_views_share_the_identity_of_their_storage():
    tensor = torch.empty(6)
    assert bigload.id_tensor_storage(tensor) == bigload.id_tensor_storage(tensor[2:])
    assert bigload.id_tensor_storage(tensor) != bigload.id_tensor_storage(torch.empty(6))
    assert bigload.id_tensor_storage(tensor.to("meta")) == (torch.device("meta"), 0, 24)


def test_a_tensor_without_a_storage_of_its_own_is_told_by_device_and_size():
    assert bigload.id_tensor_storage(torch.eye(3).to_sparse()) == (torch.device("cpu"), 0, 36)
