import pytest
import torch
from torch import nn

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DTYPES
from bigload.errors import StateDictMismatchError
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.selection import Selection
from bigload.loading.tensors.assign import Assignment, assign, match
from builders import num_bytes_of


class Tied(nn.Module):
    """An embedding and a head that share one weight, a saved buffer, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.full((3,), 7.0), persistent=False)
        self.register_buffer("absent", None)
        self.register_parameter("bias", None)


def infos(**forms):
    tensors = [
        TensorInfo(name, DTYPES[dtype], tuple(shape), Span("file", 8, 8 + num_bytes_of(dtype, shape)))
        for name, (dtype, shape) in {name.replace("__", "."): form for name, form in forms.items()}.items()
    ]
    wanted = tuple(RequestedTensor(tensor=tensor, dtype=tensor.dtype) for tensor in tensors)
    return Selection(wanted=wanted, left_on_disk=())


def mismatch(module, tensors):
    with pytest.raises(StateDictMismatchError) as caught:
        match(module, tensors, strict=True)
    return caught.value.missing, caught.value.unexpected, caught.value.misshapen


EMBED, SCALE = ("F32", [6, 4]), ("F32", [2])


def test_one_stored_tensor_serves_all_places_that_are_tied():
    expected = (
        Assignment(tensor_name="scale", places=("scale",)),
        Assignment(tensor_name="embed.weight", places=("embed.weight", "head.weight")),
    )
    assert match(Tied(), infos(embed__weight=EMBED, scale=SCALE), strict=True) == expected


def test_either_name_of_a_tied_weight_will_do():
    found = match(Tied(), infos(head__weight=EMBED, scale=SCALE), strict=True)
    assert Assignment(tensor_name="head.weight", places=("embed.weight", "head.weight")) in found


def test_both_names_of_a_tied_weight_may_be_stored():
    found = match(Tied(), infos(head__weight=EMBED, embed__weight=EMBED, scale=SCALE), strict=True)
    assert {assignment.tensor_name for assignment in found} == {"embed.weight", "scale"}


def test_what_is_missing_unexpected_and_misshapen_is_told_apart():
    missing, unexpected, misshapen = mismatch(Tied(), infos(scale=("F32", [3]), other=SCALE))
    assert missing == ("embed.weight",)
    assert unexpected == ("other",)
    assert misshapen == ("scale is [3] in the checkpoint, [2] in the module",)


def test_a_buffer_that_is_not_saved_is_neither_missing_nor_expected():
    missing, unexpected, _ = mismatch(Tied(), infos(embed__weight=EMBED, scale=SCALE, cache=("F32", [3])))
    assert (missing, unexpected) == ((), ("cache",))


def test_without_strict_only_what_matches_is_assigned():
    found = match(Tied(), infos(scale=("F32", [3]), embed__weight=EMBED, other=SCALE), strict=False)
    assert [assignment.tensor_name for assignment in found] == ["embed.weight"]


def test_a_module_without_state_matches_nothing_stored():
    assert match(nn.ReLU(), infos(), strict=True) == ()


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no four-bit dtype")
def test_the_shape_of_packed_tensors_is_compared_as_torch_has_it():
    module = nn.Module()
    module.register_buffer("packed", torch.empty((2, 4), dtype=torch.float4_e2m1fn_x2))
    assert match(module, infos(packed=("F4", [2, 8])), strict=True)


def test_a_submodule_used_twice_is_filled_once():
    shared = nn.Linear(2, 2, bias=False)
    module = nn.Sequential(shared, shared)
    found = match(module, infos(**{"0__weight": ("F32", [2, 2])}), strict=True)
    assert found == (Assignment(tensor_name="0.weight", places=("0.weight", "1.weight")),)


def test_a_meta_parameter_becomes_the_tensor_itself_and_keeps_requires_grad():
    module = nn.Linear(2, 2, bias=False, device="meta")
    module.weight.requires_grad_(False)
    value = torch.arange(4, dtype=torch.bfloat16).view(2, 2)
    assign(module, (Assignment(tensor_name="w", places=("weight",)),), {"w": value})
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.data_ptr() == value.data_ptr()
    assert (module.weight.dtype, module.weight.requires_grad) == (torch.bfloat16, False)


def test_a_meta_buffer_stays_a_buffer():
    module = nn.BatchNorm1d(2, device="meta")
    value = torch.tensor([1.0, 2.0])
    assign(module, (Assignment(tensor_name="m", places=("running_mean",)),), {"m": value})
    assert dict(module.named_buffers())["running_mean"] is value


def test_a_parameter_with_memory_keeps_it_and_its_dtype():
    module = nn.Linear(2, 2, bias=False, dtype=torch.float64)
    parameter, address = module.weight, module.weight.data_ptr()
    value = torch.arange(4, dtype=torch.bfloat16).view(2, 2)
    assign(module, (Assignment(tensor_name="w", places=("weight",)),), {"w": value})
    assert module.weight is parameter
    assert (module.weight.data_ptr(), module.weight.dtype) == (address, torch.float64)
    assert module.weight.tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_an_integer_tensor_for_a_trainable_meta_parameter_is_assigned_without_gradient():
    module = nn.Linear(2, 2, bias=False, device="meta")
    value = torch.arange(4, dtype=torch.int8).view(2, 2)
    assign(module, (Assignment(tensor_name="w", places=("weight",)),), {"w": value})
    assert (module.weight.dtype, module.weight.requires_grad) == (torch.int8, False)


def test_what_stays_on_disk_is_neither_missing_nor_unexpected_but_must_be_known():
    def kept(name):
        return Selection(wanted=infos(scale=SCALE).wanted, left_on_disk=(name,))

    assert [found.tensor_name for found in match(Tied(), kept("head.weight"), strict=True)] == ["scale"]
    with pytest.raises(StateDictMismatchError) as caught:
        match(Tied(), kept("other"), strict=True)
    assert (caught.value.missing, caught.value.unexpected) == (("embed.weight",), ("other",))
