import pytest
import torch
from torch import nn

import bigload
from bigload.errors import InvalidCheckpointError


class Keeper:
    """What a hook that offloads has."""

    offload = True

    def __init__(self, module, recurse=False):
        named = [*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)]
        self.weights_map = {name: tensor.detach().clone() for name, tensor in named}
        self.execution_device, self.peak = "cpu", 0
        self.post_forward(module, None)
        module._hf_hook = self

    def pre_forward(self, module):
        for name, value in self.weights_map.items():
            bigload.set_module_tensor_to_device(module, name, self.execution_device, value=value)

    def post_forward(self, module, output):
        for name in self.weights_map:
            bigload.set_module_tensor_to_device(module, name, "meta")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.first = nn.Linear(3, 3)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Noted(nn.Linear):
    def get_extra_state(self):
        return {"note": 3}

    def set_extra_state(self, state):
        """Take nothing."""


def same(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].device.type == "cpu", name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("offloaded", ["everything", "leaves", "one", "nothing", "a whole part"])
def test_the_state_of_an_offloaded_model_is_what_it_was(offloaded):
    """accelerate leaves out what belongs to the root itself."""
    model = Model()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if offloaded == "a whole part":
        Keeper(model.inner, recurse=True)
    else:
        chosen = {
            "everything": list(model.modules()),
            "leaves": [model.first, *model.inner],
            "one": [model.inner[0]],
            "nothing": [],
        }
        for module in chosen[offloaded]:
            Keeper(module)
    same(bigload.get_state_dict_offloaded_model(model), expected)
    again = model.state_dict()
    assert all(again[name].is_meta for name in expected) == (offloaded == "everything")


def test_what_is_on_meta_with_nobody_to_bring_it_is_told_and_left_out(caplog):
    model = Model()
    bigload.set_module_tensor_to_device(model, "first.weight", "meta")
    found = bigload.get_state_dict_offloaded_model(model)
    assert "first.weight" not in found
    assert "first.bias" in found
    assert "['first.weight']" in caplog.text
    assert "meta" in caplog.text


def test_state_that_is_no_tensor_is_there_as_well():
    model = nn.Sequential(Noted(2, 2))
    Keeper(model[0])
    assert bigload.get_state_dict_offloaded_model(model)["0._extra_state"] == {"note": 3}


def test_tied_weights_stay_one_in_the_state():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    found = bigload.get_state_dict_offloaded_model(model)
    assert found["0.weight"].data_ptr() == found["1.weight"].data_ptr()


def test_too_little_memory_is_said_to_be_that():
    model = nn.Sequential(nn.Linear(2, 2))
    keeper = Keeper(model[0])

    def fail(module):
        raise MemoryError

    keeper.pre_forward = fail
    with pytest.raises(MemoryError, match="must fit in CPU memory"):
        bigload.get_state_dict_offloaded_model(model)


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_the_weights_of_one_module_are_put_into_a_state_dict(is_offloaded):
    model = Model()
    expected = {f"first.{name}": tensor.clone() for name, tensor in model.first.state_dict().items()}
    if is_offloaded:
        Keeper(model.first)
    state = {"first.weight": "somewhere", "first.bias": "somewhere", "other": "kept"}
    found = bigload.get_state_dict_from_offload(model.first, "first.weight", state)
    assert found is state
    assert found["other"] == "kept"
    same({name: found[name] for name in expected}, expected)


def test_the_weights_of_a_root_are_put_into_a_state_dict():
    """Its parameters have no dot in their names, of which accelerate cuts off the last letter."""
    layer = nn.Linear(2, 2)
    found = bigload.get_state_dict_from_offload(layer, "weight", {"weight": "somewhere"})
    assert torch.equal(found["weight"], layer.weight)


def test_offloaded_weights_come_back_for_good(tmp_path):
    model, index = Model(), {}
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in model.state_dict().items():
        bigload.offload_weight(tensor, name, tmp_path, index)
        bigload.set_module_tensor_to_device(model, name, "meta")
    bigload.load_offloaded_weights(model, index, tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    same(model.state_dict(), expected)
    assert isinstance(model.scale, nn.Parameter)
    bigload.load_offloaded_weights(model, None, tmp_path)


def test_scales_of_8_bit_weights_go_along(tmp_path):
    layer, index = nn.Linear(2, 2, bias=False), {}
    bigload.offload_weight(torch.ones(2, 2), "weight", tmp_path, index)
    bigload.offload_weight(torch.full((2,), 3.0), "SCB", tmp_path, index)
    bigload.load_offloaded_weights(layer, index, tmp_path)
    assert torch.equal(layer.weight.SCB, torch.full((2,), 3.0))


@pytest.mark.parametrize("name", ["../w", "a\0", "\ud800"], ids=repr)
def test_an_index_names_no_weights_outside_its_folder(tmp_path, name):
    (tmp_path / "folder").mkdir()
    bigload.offload_weight(torch.ones(1), "w", tmp_path)
    with pytest.raises(InvalidCheckpointError, match=r"leaves the folder|holds a character"):
        bigload.load_offloaded_weights(nn.Linear(1, 1), {name: {"dtype": "float32", "shape": [1]}}, tmp_path / "folder")
