import pytest
import torch
from torch import nn

import bigload
from bigload.errors import LoadError


class Scaled(nn.Parameter):
    """A parameter that cannot be made without a scale."""

    def __new__(cls, data, scale, requires_grad=True):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.scale = scale
        return made


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


class Int8Params(nn.Parameter):
    """Stands for the class of bitsandbytes; it is told by its name."""


class Keeper:
    """What a hook that offloads has, with its weights in a dict."""

    offload = True

    def __init__(self, weights, device="cpu"):
        self.weights_map, self.execution_device, self.devices = weights, device, []

    def pre_forward(self, module):
        self.devices.append(self.execution_device)
        for name, value in self.weights_map.items():
            bigload.set_module_tensor_to_device(module, name, self.execution_device, value=value)

    def post_forward(self, module, output):
        for name in self.weights_map:
            bigload.set_module_tensor_to_device(module, name, "meta")
        return output


class Several:
    """A hook that is several, as accelerate puts them together."""

    def __init__(self, *hooks):
        self.hooks = hooks


def offloaded(module, hook=None):
    weights = {name: value.detach().clone() for name, value in module.named_parameters()}
    keeper = Keeper(weights)
    keeper.post_forward(module, None)
    module._hf_hook = keeper if hook is None else Several(hook, keeper)
    return weights, keeper


def test_a_tensor_on_meta_comes_back_only_with_values():
    layer = nn.Linear(3, 4)
    values = torch.randn(4, 3)
    bigload.set_module_tensor_to_device(layer, "weight", "meta")
    assert layer.weight.is_meta
    assert not layer.bias.is_meta
    with pytest.raises(ValueError, match=r"weight is on the meta device, we need a `value` to put in on cpu\."):
        bigload.set_module_tensor_to_device(layer, "weight", "cpu")
    bigload.set_module_tensor_to_device(layer, "weight", "cpu", value=values)
    assert torch.equal(layer.weight, values)
    assert isinstance(layer.weight, nn.Parameter)


def test_values_of_another_shape_are_refused_and_nothing_changes():
    model = nn.Sequential(nn.Linear(3, 4))
    before = model[0].weight
    with pytest.raises(ValueError, match="Trying") as failed:
        bigload.set_module_tensor_to_device(model, "0.weight", "cpu", value=torch.zeros(2, 2))
    assert str(failed.value) == (
        'Trying to set a tensor of shape torch.Size([2, 2]) in "weight" (which has shape torch.Size([4, 3])), '
        "this looks incorrect."
    )
    assert model[0].weight is before


@pytest.mark.parametrize("name", ["nothing", "bias"])
def test_a_name_without_a_tensor_is_refused(name):
    with pytest.raises(ValueError, match=f"does not have a parameter or a buffer named {name}"):
        bigload.set_module_tensor_to_device(nn.Linear(2, 2, bias=False), name, "cpu", value=torch.zeros(2))


def test_a_name_below_nothing_is_refused():
    holder = nn.Module()
    holder.register_module("child", None)
    with pytest.raises(ValueError, match="has no attribute child"):
        bigload.set_module_tensor_to_device(holder, "child.weight", "cpu")


@pytest.mark.parametrize(
    ("old", "value", "dtype", "becomes"),
    [
        (torch.float16, torch.float32, None, torch.float16),
        (torch.int64, torch.int32, None, torch.int64),
        (torch.float32, torch.float64, "bfloat16", torch.bfloat16),
        (torch.float32, torch.float32, "torch.float16", torch.float16),
        (torch.float32, torch.int8, torch.float16, torch.int8),
        (torch.float32, torch.bool, torch.float16, torch.bool),
        (torch.float32, torch.complex64, torch.float16, torch.complex64),
        (torch.complex64, torch.complex128, torch.complex64, torch.complex64),
    ],
)
def test_the_dtype_is_the_old_one_or_for_floats_the_one_asked_for(old, value, dtype, becomes):
    module = nn.Module()
    can_train = old.is_floating_point or old.is_complex
    module.p = nn.Parameter(torch.ones(3, dtype=old), requires_grad=can_train)
    module.register_buffer("b", torch.ones(3, dtype=old))
    for name in ("p", "b"):
        bigload.set_module_tensor_to_device(module, name, "cpu", value=torch.ones(3, dtype=value), dtype=dtype)
        assert getattr(module, name).dtype == becomes
    assert module.p.requires_grad == (can_train and (becomes.is_floating_point or becomes.is_complex))


def test_a_dtype_is_for_a_tensor_that_is_only_moved_as_well():
    layer = nn.Linear(2, 2)
    bigload.set_module_tensor_to_device(layer, "weight", "meta", dtype=torch.float16)
    bigload.set_module_tensor_to_device(layer, "bias", "cpu", dtype="float64")
    assert (layer.weight.dtype, layer.bias.dtype) == (torch.float16, torch.float64)


def test_a_word_that_is_no_dtype_is_refused():
    with pytest.raises(ValueError, match='"float17" is not a dtype'):
        bigload.set_module_tensor_to_device(nn.Linear(2, 2), "weight", "cpu", dtype="float17")


def test_values_that_need_no_change_are_taken_without_a_copy():
    layer, values = nn.Linear(2, 2), torch.ones(2, 2)
    bigload.set_module_tensor_to_device(layer, "weight", "cpu", value=values)
    assert layer.weight.data_ptr() == values.data_ptr()


def test_a_tensor_that_is_there_already_stays_the_object_that_it_is():
    layer = nn.Linear(2, 2)
    before = layer.weight
    bigload.set_module_tensor_to_device(layer, "weight", "cpu")
    assert layer.weight is before


def test_class_attributes_and_requires_grad_of_a_parameter_stay():
    module = nn.Module()
    module.weight = Scaled(torch.ones(2), scale=3, requires_grad=False)
    module.weight.sharded = "yes"
    for device, value in (("meta", None), ("cpu", torch.zeros(2))):
        bigload.set_module_tensor_to_device(module, "weight", device, value=value)
        assert type(module.weight) is Scaled
        assert (module.weight.scale, module.weight.sharded, module.weight.requires_grad) == (3, "yes", False)


def test_a_parameter_may_be_a_tensor_of_another_class():
    module = nn.Module()
    module.weight = nn.Parameter(torch.ones(2).as_subclass(Tagged))
    assert isinstance(module.weight, nn.Parameter)
    assert type(module.weight) is Tagged
    bigload.set_module_tensor_to_device(module, "weight", "cpu", value=torch.zeros(2).as_subclass(Tagged))
    assert isinstance(module.weight, nn.Parameter)
    assert type(module.weight) is Tagged


def test_buffers_stay_buffers_and_what_a_state_dict_has_of_them_stays():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("lost", torch.ones(2), persistent=False)
    for name in ("kept", "lost"):
        bigload.set_module_tensor_to_device(module, name, "cpu", value=torch.zeros(2))
    assert list(module.state_dict()) == ["kept"]
    assert not list(module.parameters())
    assert torch.equal(module.lost, torch.zeros(2))


def test_nothing_of_it_is_part_of_a_graph():
    module = nn.Module()
    module.register_buffer("b", torch.ones(2))
    bigload.set_module_tensor_to_device(module, "b", "cpu", value=torch.ones(2, requires_grad=True), dtype="float64")
    assert module.b.grad_fn is None


def test_scales_go_along_as_an_attribute():
    layer = nn.Linear(2, 2)
    scales = torch.ones(2, dtype=torch.float16)
    bigload.set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(2, 2), fp16_statistics=scales)
    assert torch.equal(layer.weight.SCB, scales)


def test_parameters_of_bitsandbytes_are_moved_but_given_no_values():
    module = nn.Module()
    module.weight = Int8Params(torch.ones(2), requires_grad=False)
    with pytest.raises(LoadError, match="Int8Params"):
        bigload.set_module_tensor_to_device(module, "weight", "cpu", value=torch.zeros(2))
    bigload.set_module_tensor_to_device(module, "weight", "meta")
    assert module.weight.is_meta
    assert type(module.weight) is Int8Params


@pytest.mark.parametrize("by", ["value", "old"])
def test_tied_weights_are_one_copy_on_a_device(by):
    shared = torch.ones(2, 2)
    layers = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    copies = {shared.data_ptr(): {}}
    for layer in layers:
        layer.weight = nn.Parameter(shared)
        value = shared if by == "value" else None
        if value is not None:
            bigload.set_module_tensor_to_device(layer, "weight", "meta")
        bigload.set_module_tensor_to_device(
            layer, "weight", "cpu", value=value, dtype="float64", tied_params_map=copies
        )
    assert layers[0].weight is layers[1].weight is copies[shared.data_ptr()]["cpu"]
    assert layers[0].weight.dtype == torch.float64


def test_tied_copies_are_found_for_buffers_and_they_stay_buffers():
    module, values = nn.Module(), torch.ones(2)
    module.register_buffer("b", torch.zeros(2))
    copy = torch.full((2,), 5.0)
    bigload.set_module_tensor_to_device(
        module, "b", "cpu", value=values, tied_params_map={values.data_ptr(): {"cpu": copy}}
    )
    assert module.b is copy
    assert not module._parameters


def test_no_tensor_on_meta_is_taken_for_another_by_its_address():
    """All of them are at address 0, which accelerate looks up like any other."""
    layer, wrong = nn.Linear(2, 2, device="meta"), torch.full((2, 2), 7.0)
    copies = {0: {"cpu": wrong}}
    bigload.set_module_tensor_to_device(layer, "weight", "cpu", value=torch.zeros(2, 2), tied_params_map=copies)
    assert torch.equal(layer.weight, torch.zeros(2, 2))
    assert copies == {0: {"cpu": wrong}}


def test_no_part_of_a_tensor_is_taken_for_the_whole_at_its_address():
    whole = torch.arange(4.0)
    module = nn.Module()
    module.part = nn.Parameter(torch.zeros(2))
    copies = {whole.data_ptr(): {"cpu": whole.clone()}}
    bigload.set_module_tensor_to_device(module, "part", "cpu", value=whole[:2], tied_params_map=copies)
    assert module.part.shape == (2,)
    assert torch.equal(module.part, whole[:2])


def test_retied_parameters_are_the_first_that_has_memory():
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    bigload.set_module_tensor_to_device(model, "a.weight", "meta")
    bigload.set_module_tensor_to_device(model, "c.bias", "meta")
    expected = model["b"].weight
    bigload.retie_parameters(model, [["a.weight", "b.weight", "c.weight"], ["c.bias"]])
    assert model["a"].weight is expected
    assert model["c"].weight is expected
    assert model["c"].bias.is_meta


def test_only_a_hook_that_offloads_says_that_weights_are_elsewhere():
    layer = nn.Linear(2, 2)
    assert not bigload.has_offloaded_params(layer)
    layer._hf_hook = Keeper({})
    assert bigload.has_offloaded_params(layer)
    layer._hf_hook.offload = False
    assert not bigload.has_offloaded_params(layer)
    layer._hf_hook = object()
    assert not bigload.has_offloaded_params(layer)


@pytest.mark.parametrize("hook", [None, object()], ids=["alone", "one of several"])
def test_offloaded_weights_are_there_while_a_module_is_aligned(hook):
    layer = nn.Linear(2, 2)
    weights, keeper = offloaded(layer, hook)
    assert bigload.has_offloaded_params(layer)
    with bigload.align_module_device(layer):
        assert torch.equal(layer.weight, weights["weight"])
    with bigload.align_module_device(layer, torch.device("cpu")):
        assert torch.equal(layer.bias, weights["bias"])
    assert layer.weight.is_meta
    assert keeper.devices == ["cpu", torch.device("cpu")]
    assert keeper.execution_device == "cpu"


def test_offloaded_weights_go_again_when_something_fails():
    layer = nn.Linear(2, 2)
    _, keeper = offloaded(layer)
    with pytest.raises(KeyError), bigload.align_module_device(layer, "meta"):
        raise KeyError
    assert layer.weight.is_meta
    assert keeper.execution_device == "cpu"


def test_without_a_hook_and_a_device_nothing_moves():
    layer = nn.Linear(2, 2, device="meta")
    with bigload.align_module_device(layer):
        assert layer.weight.is_meta


def test_what_was_moved_comes_back_as_the_parameters_that_were_there():
    layer, head = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    head.weight = layer.weight
    values = layer.weight.detach().clone()
    with bigload.align_module_device(layer, "meta"):
        assert layer.weight.is_meta
        assert layer.bias.is_meta
        assert not head.weight.is_meta
    assert layer.weight is head.weight
    assert torch.equal(layer.weight, values)


def test_a_parameter_that_was_replaced_meanwhile_stays_the_new_one():
    layer = nn.Linear(2, 2)
    new = nn.Parameter(torch.zeros(2, 2))
    with bigload.align_module_device(layer, "meta"):
        layer.weight = new
    assert layer.weight is new


def test_one_parameter_with_two_names_is_moved_as_one():
    module = nn.Module()
    module.a = module.b = nn.Parameter(torch.ones(2))
    before = module.a
    with bigload.align_module_device(module, "meta"):
        assert module.a is module.b
        assert module.a.is_meta
    assert module.a is module.b is before


def test_a_parameter_that_was_removed_meanwhile_stays_away():
    layer = nn.Linear(2, 2)
    with bigload.align_module_device(layer, "meta"):
        layer.bias = None
    assert layer.bias is None
    assert not layer.weight.is_meta


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [("cuda", "cuda:0", True), ("cuda", "cuda:1", False), ("cpu", "cpu:0", True), ("cpu", "meta", False)],
)
def test_a_device_without_an_index_is_the_first_of_its_kind(first, second, same):
    assert bigload.check_device_same(torch.device(first), torch.device(second)) == same
