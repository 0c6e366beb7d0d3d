"""Models spread over RAM and disk. On accelerators: `tests/simulated/test_dispatch.py`."""

import copy
import logging

import pytest
import torch
from torch import nn

import bigload
from bigload import cpu_offload, disk_offload, dispatch_model
from bigload.errors import (
    DispatchedModelError,
    OptionError,
    ReadError,
)

INPUT = torch.linspace(-1, 1, 8).reshape(2, 4)


class Model(nn.Module):
    """Two linear layers around a norm with buffers, and a parameter of the model's own."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.scale = nn.Parameter(torch.rand(4))
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4)
        self.norm.running_mean.uniform_()
        self.eval()

    def forward(self, x):
        return self.last(self.norm(self.first(x * self.scale)))


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.last.weight = self.first.weight


HALF = {"scale": "cpu", "first": "disk", "norm": "disk", "last": "cpu"}


def test_a_whole_model_on_disk_answers_as_before(tmp_path):
    model, expected = Model(), Model()(INPUT)
    assert dispatch_model(model, {"": "disk"}, offload_dir=tmp_path) is model
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(INPUT), expected)
    assert model.hf_device_map == {"": "disk"}


def test_tensors_that_the_model_owns_itself_stay_on_the_main_device(tmp_path):
    model, expected = Model(), Model()(INPUT)
    dispatch_model(model, {**HALF, "scale": "disk"}, offload_dir=tmp_path)
    assert not model.scale.is_meta
    assert torch.equal(model(INPUT), expected)


@pytest.mark.parametrize(
    "offload", [lambda model, folder: dispatch_model(model, HALF, offload_dir=folder), disk_offload], ids=["map", "all"]
)
def test_an_offload_folder_is_never_reused_for_other_weights(tmp_path, offload):
    one, other = Model(seed=1), Model(seed=2)
    expected = other(INPUT)
    offload(one, tmp_path)
    one(INPUT)
    offload(other, tmp_path)
    assert torch.equal(other(INPUT), expected)
    with pytest.raises(ReadError):  # and the first model says so, instead of computing with the weights of the second
        one(INPUT)


def test_a_missing_offload_folder_is_reported_before_anything_is_moved():
    model = Model()
    with pytest.raises(OptionError, match="offload_dir") as caught:
        dispatch_model(model, HALF)
    assert caught.value.details == ("first", "norm")
    assert isinstance(caught.value, ValueError)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model, "_hf_hook")
    assert not hasattr(model, "hf_device_map")


def test_weights_that_nobody_has_are_reported_before_anything_is_moved(tmp_path):
    with bigload.init_empty_weights():
        model = Model()
    with pytest.raises(bigload.AbsentWeightError):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
    assert not hasattr(model, "_hf_hook")


def test_a_model_without_values_takes_them_from_the_folder(tmp_path):
    expected = disk_offload(Model(), tmp_path)(INPUT)
    model = Model().to("meta")
    model.norm = Model().norm
    assert torch.equal(dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)(INPUT), expected)


def test_what_the_caller_gave_is_not_changed(tmp_path):
    model, device_map = Model(), dict(HALF)
    state = model.state_dict()
    values, kept = {name: tensor.clone() for name, tensor in state.items()}, list(state)
    dispatch_model(model, device_map, state_dict=state, offload_dir=tmp_path)
    model(INPUT)
    assert device_map == HALF
    assert list(state) == kept
    assert all(torch.equal(state[name], values[name]) for name in kept)
    model.hf_device_map["new"] = "cpu"
    assert device_map == HALF


def test_a_map_with_one_device_moves_the_model_and_attaches_nothing():
    model = dispatch_model(Model(), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}
    assert hasattr(dispatch_model(model, {"": "cpu"}, force_hooks=True), "_hf_hook")


def test_a_map_that_leaves_something_out_is_refused():
    with pytest.raises(ValueError, match=r"last\.weight"):
        dispatch_model(Model(), {"scale": "cpu", "first": "cpu", "norm": "cpu"})


def test_a_model_can_be_moved_again_when_its_hooks_are_gone(tmp_path, caplog):
    model, expected = dispatch_model(Model(), HALF, offload_dir=tmp_path), Model().double()(INPUT.double())
    bigload.remove_hook_from_submodules(model)
    with caplog.at_level(logging.WARNING, "bigload"):
        assert torch.equal(model.to(torch.float64)(INPUT.double()), expected)
    assert not caplog.records
    assert "to" not in vars(model)


def test_a_copy_of_a_dispatched_model_is_dispatched_by_itself(tmp_path):
    model, expected = dispatch_model(Model(), HALF, offload_dir=tmp_path), Model()(INPUT)
    copied = copy.deepcopy(model)
    assert copied.first.forward is not model.first.forward
    bigload.remove_hook_from_submodules(model)
    model.last.weight.data.zero_()
    assert copied.first.weight.is_meta
    assert torch.equal(copied(INPUT), expected)
    with pytest.raises(DispatchedModelError):
        copied.to("cpu")


def test_weights_are_offloaded_again_when_a_forward_raises(tmp_path):
    model = dispatch_model(Model(), {"": "disk"}, offload_dir=tmp_path)
    with pytest.raises(RuntimeError, match="dtype"):
        model(INPUT.double())
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if name != "scale")
    assert torch.equal(model(INPUT), Model()(INPUT))


@pytest.mark.parametrize("where", [{"": "disk"}, HALF, {**HALF, "first": "cpu", "last": "disk"}], ids=str)
def test_tied_weights_stay_tied(where, tmp_path):
    model = dispatch_model(Tied(), where, offload_dir=tmp_path)
    assert model.first.weight is model.last.weight
    assert torch.equal(model(INPUT), Tied()(INPUT))
    assert model.first.weight is model.last.weight


def test_a_map_may_name_a_module_and_another_device_inside(tmp_path):
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    expected = model(INPUT)
    dispatch_model(model, {"": "disk", "0.1": "cpu"}, offload_dir=tmp_path)
    assert [layer.weight.is_meta for layer in (*model[0], model[1])] == [True, False, True]
    assert torch.equal(model(INPUT), expected)


class Gate(nn.Module):
    """A module that owns a parameter beside another module."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.full((4,), 0.5))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) * self.gate


def test_a_parameter_that_a_split_module_owns_is_offloaded_by_itself(tmp_path):
    model = nn.Sequential(Gate(), nn.Linear(4, 4))
    expected = model(INPUT)
    dispatch_model(model, {"0.gate": "disk", "0.inner": "cpu", "1": "cpu"}, offload_dir=tmp_path)
    assert model[0].gate.is_meta
    assert torch.equal(model(INPUT), expected)


@pytest.mark.parametrize("offload", [lambda model, _: cpu_offload(model), disk_offload], ids=["cpu", "disk"])
@pytest.mark.parametrize("kind", [Model, Tied])
def test_an_offloaded_model_answers_as_before(offload, kind, tmp_path):
    model = offload(kind(), tmp_path)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(model(INPUT), kind()(INPUT))
    assert (model.first.weight is model.last.weight) == (kind is Tied)


def test_weights_on_the_cpu_are_not_copied_to_be_offloaded():
    model = Model()
    address = model.first.weight.data_ptr()
    cpu_offload(model)
    assert model.first._hf_hook.weights_map["weight"].data_ptr() == address


def test_a_model_on_the_meta_device_runs_with_values_from_a_state_dict():
    state = Model().state_dict()
    model = cpu_offload(Model().to("meta"), state_dict=state, offload_buffers=True)
    assert torch.equal(model(INPUT), Model()(INPUT))


def test_a_model_without_parameters_can_be_offloaded():
    assert torch.equal(cpu_offload(nn.ReLU())(INPUT), INPUT.relu())


def test_a_model_with_a_hook_returned_by_another_makes_room_for_it():
    one, first = bigload.cpu_offload_with_hook(Model(), "cpu")
    two, second = bigload.cpu_offload_with_hook(Model(seed=1), "cpu", prev_module_hook=first)
    assert torch.equal(two(one(INPUT)), Model(seed=1)(Model()(INPUT)))
    second.remove()
    assert not hasattr(two, "_hf_hook")


@pytest.mark.parametrize("where", ["disk", "cpu"])
def test_attention_of_torch_takes_weights_of_a_module_that_it_does_not_call(where, tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    x = INPUT[None]
    with torch.no_grad():
        expected = model(x)
        if where == "disk":
            dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)
        else:
            cpu_offload(model)
        torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("where", [{"": "disk"}, HALF], ids=str)
def test_tied_weights_are_tied_when_the_hooks_are_gone(where, tmp_path):
    model = dispatch_model(Tied(), where, offload_dir=tmp_path)
    bigload.remove_hook_from_submodules(model)
    assert model.first.weight is model.last.weight
    assert torch.equal(model(INPUT), Tied()(INPUT))


class Lists(nn.Module):
    """Uses parameters and buffers of modules that have no forward, and calls a module inside of one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.several = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.named = nn.ModuleList([nn.ParameterDict({"scale": nn.Parameter(torch.randn(4))}), nn.Linear(4, 4)])
        self.book = nn.Module()
        self.book.register_buffer("words", torch.randn(4))

    def forward(self, x):
        return self.named[1](x * self.several[0] + self.several[1]) * self.named[0]["scale"] + self.book.words


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize(
    "offloaded",
    [
        lambda model, folder: dispatch_model(model, {"": "disk"}, offload_dir=folder, offload_buffers=True),
        lambda model, folder: disk_offload(model, folder, offload_buffers=True),
        lambda model, folder: cpu_offload(model, "cpu"),
    ],
)
def test_lists_of_parameters_come_with_the_module_that_uses_them(offloaded, is_nested, tmp_path):
    plain = nn.Sequential(Lists(), nn.ReLU()) if is_nested else Lists()
    expected, state = plain(INPUT), plain.state_dict()
    model = offloaded(copy.deepcopy(plain), tmp_path)
    for _ in range(2):
        assert torch.equal(model(INPUT), expected)
        assert all(parameter.is_meta for parameter in model.parameters())
    found = bigload.get_state_dict_offloaded_model(model)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
    bigload.remove_hook_from_submodules(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(INPUT), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")  # torch 2.15
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda module: torch.jit.trace(module, INPUT)])
@pytest.mark.parametrize(
    "offloaded",
    [
        lambda model, folder: dispatch_model(model, HALF, offload_dir=folder),
        disk_offload,
        lambda model, _: cpu_offload(model),
    ],
)
def test_modules_of_torch_jit_are_refused_before_anything_changes(offloaded, compiled, tmp_path):
    model = Model()
    model.last = compiled(model.last)
    with pytest.raises(DispatchedModelError, match=r"(?s)torch\.jit.*last"):
        offloaded(model, tmp_path)
    assert torch.equal(model(INPUT), Model()(INPUT))
    assert not hasattr(model, "_hf_hook")


class Located(Model):
    @property
    def device(self):
        return next(parameter.device for parameter in self.parameters())


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_offloaded_model_names_the_device_where_it_runs(prefetch, tmp_path):
    model = disk_offload(Located(), tmp_path, prefetch=prefetch)
    assert model.scale.is_meta
    for each in (model, copy.deepcopy(model)):
        assert each.device == torch.device("cpu")
    assert Located().to("meta").device == torch.device("meta"), "nothing of it is offloaded"
    assert Located().device == torch.device("cpu")
    bigload.remove_hook_from_submodules(model)
    assert model.device == torch.device("cpu")
