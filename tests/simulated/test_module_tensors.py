"""Weights of modules between the CPU, the disk and simulated accelerators."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload

SIM = [torch.device("sim", index) for index in range(4)]


def crossed(simulation):
    """Return the copies between devices, as pairs and bytes."""
    return [(str(each.source), str(each.destination), each.num_bytes) for each in simulation.transfers]


@pytest.mark.parametrize("device", [1, "sim:1", SIM[1]], ids=str)
def test_a_tensor_goes_to_a_device_and_back(simulation, device):
    layer = nn.Linear(3, 4)
    values = layer.weight.detach().clone()
    bigload.set_module_tensor_to_device(layer, "weight", device)
    assert layer.weight.device == SIM[1]
    bigload.set_module_tensor_to_device(layer, "weight", "sim:2")
    assert layer.weight.device == SIM[2]
    bigload.set_module_tensor_to_device(layer, "weight", "cpu")
    assert torch.equal(layer.weight, values)
    bigload.set_module_tensor_to_device(layer, "weight", device, value=values.double(), dtype=torch.float16)
    assert torch.equal(layer.weight.cpu(), values.half())
    assert layer.weight.device == SIM[1]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_tensor_that_came_to_the_cpu_can_be_read(simulation, non_blocking):
    """A copy to the CPU that does not block gives what is not there yet to whoever reads it."""
    layer = nn.Linear(64, 64)
    values = layer.weight.detach().clone()
    bigload.set_module_tensor_to_device(layer, "weight", 0, non_blocking=non_blocking)
    bigload.set_module_tensor_to_device(layer, "weight", "cpu", non_blocking=non_blocking)
    assert torch.equal(layer.weight, values)


def test_tied_weights_cross_to_a_device_once(simulation):
    shared = torch.randn(8, 8)
    layers = [nn.Linear(8, 8, bias=False, device="meta") for _ in range(3)]
    copies = {shared.data_ptr(): {}}
    for layer in layers:
        bigload.set_module_tensor_to_device(layer, "weight", 0, value=shared, tied_params_map=copies)
    assert len({id(layer.weight) for layer in layers}) == 1
    assert crossed(simulation) == [("cpu", "sim:0", shared.nbytes)]
    assert simulation.used[0] == shared.nbytes


def test_the_memory_of_a_tensor_that_went_to_meta_is_free(simulation):
    layer = nn.Linear(8, 8, bias=False)
    bigload.set_module_tensor_to_device(layer, "weight", 3)
    assert simulation.used[3] == layer.weight.nbytes
    bigload.set_module_tensor_to_device(layer, "weight", "meta")
    assert simulation.used[3] == 0


def test_the_cache_of_a_device_is_never_emptied(simulation, monkeypatch):
    emptied = []
    for owner in (torch.accelerator, torch.get_device_module("sim")):
        for name in ("empty_cache", "synchronize"):
            monkeypatch.setattr(owner, name, lambda *_, name=name: emptied.append(name), raising=False)
    layer = nn.Linear(2, 2)
    for device in (0, 1, "cpu"):
        bigload.set_module_tensor_to_device(layer, "weight", device, clear_cache=True)
    monkeypatch.undo()
    assert "empty_cache" not in emptied


def test_aligned_parameters_come_back_with_their_changes(simulation):
    layer, head = nn.Linear(4, 4), nn.Linear(4, 4)
    head.weight = layer.weight
    with bigload.align_module_device(layer, 2):
        assert layer.weight.device == layer.bias.device == SIM[2]
        with torch.no_grad():
            layer.weight.fill_(3)
        layer.bias.data.copy_(torch.full((4,), 5.0))
    assert layer.weight is head.weight
    assert torch.equal(layer.weight, torch.full((4, 4), 3.0))
    assert torch.equal(layer.bias, torch.full((4,), 5.0))


def test_the_state_of_a_model_on_devices_is_on_the_cpu(simulation):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model[0].to("sim:0")
    model[1].to("sim:1")
    simulation.transfers.clear()
    found = bigload.get_state_dict_offloaded_model(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert len(crossed(simulation)) == len(expected)


def test_weights_on_a_device_are_offloaded_and_tied_ones_once(simulation, tmp_path):
    shared = torch.randn(4, 4, device="sim:1")
    state = {"a": shared, "b": shared, "c": torch.ones(3, dtype=torch.bfloat16, device="sim:0")}
    simulation.transfers.clear()
    bigload.offload_state_dict(tmp_path, state)
    assert len(crossed(simulation)) == 2
    loader = bigload.OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(torch.equal(loader[name], tensor.cpu()) for name, tensor in state.items())


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_stored_weights_arrive_on_a_device(simulation, tmp_path, dtype):
    state = {"w": torch.randn(16, 4), "ids": torch.arange(5)}
    save_file(state, tmp_path / "model.safetensors")
    weights = bigload.StoredWeights(tmp_path, device=2, dtype=dtype)
    for name, tensor in state.items():
        expected = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert weights[name].device == SIM[2]
        assert torch.equal(weights[name].cpu(), expected)


def test_safetensors_of_an_index_arrive_on_the_device_of_the_loader(simulation, tmp_path):
    save_file({"w": torch.arange(6.0)}, tmp_path / "m.safetensors")
    index = {"v": {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "w", "dtype": "float16"}}
    weight = bigload.OffloadedWeightsLoader(index=index, device="sim:3")["v"]
    assert weight.device == SIM[3]
    assert torch.equal(weight.cpu(), torch.arange(6).half())


def test_parameters_come_back_when_a_device_has_no_room_for_the_next(simulation):
    layer = nn.Linear(8, 8)
    before = dict(layer.named_parameters())
    simulation.limits[1] = layer.weight.nbytes
    with pytest.raises(torch.OutOfMemoryError), bigload.align_module_device(layer, 1):
        pass
    assert all(layer.get_parameter(name) is parameter for name, parameter in before.items())
