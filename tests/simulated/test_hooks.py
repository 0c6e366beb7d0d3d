"""Hooks on accelerators that count their memory and log every copy."""

import copy

import pytest
import torch
from torch import nn

import bigload
from bigload.runtime.hooks.cpu_offload_hooks import CpuOffload, UserCpuOffloadHook

SIM = [torch.device("sim", index) for index in range(2)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


@pytest.fixture
def x():
    return torch.randn(4, 8)


def num_bytes(module):
    return sum(tensor.nbytes for _, tensor in bigload.named_module_tensors(module, recurse=True))


def close(output, expected):
    return torch.allclose(output.cpu(), expected, atol=1e-5)


@pytest.mark.parametrize("devices", [(0, 1), ("sim:0", "sim:1"), tuple(SIM)])
def test_blocks_run_on_their_devices_however_these_are_named(simulation, x, devices):
    model = Model().eval()
    expected = model(x)
    for block, device in ((model.first, devices[0]), (model.norm, devices[0]), (model.second, devices[1])):
        bigload.add_hook_to_module(block, bigload.AlignDevicesHook(execution_device=device))
    assert (model.first.weight.device, model.norm.running_mean.device, model.second.bias.device) == (
        *SIM[:1] * 2,
        SIM[1],
    )
    output = model(x)
    assert output.device == SIM[1]
    assert close(output, expected)
    bigload.add_hook_to_module(model, bigload.AlignDevicesHook(io_same_device=True))
    assert model(x.to(SIM[0])).device == SIM[0]
    assert model(x).device.type == "cpu"


def test_nothing_moves_where_everything_is_in_place(simulation, x):
    model = Model().eval()
    bigload.attach_align_device_hook_on_blocks(model, {"first": 0, "norm": 0, "second": 1})
    there = x.to(SIM[0])
    simulation.transfers.clear()
    with torch.no_grad():
        model(there)
    crossed = [(transfer.source, transfer.destination) for transfer in simulation.transfers]
    assert crossed == [(SIM[0], SIM[1]), (SIM[1], SIM[0])], "the hidden state there, and the output back"


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_a_device_holds_one_module_at_a_time(simulation, x, offload_buffers):
    model = Model().eval()
    expected = model(x)
    bigload.attach_align_device_hook(model, execution_device=0, offload=True, offload_buffers=offload_buffers)
    resting = simulation.used[0]
    assert resting == (0 if offload_buffers else 2 * 8 * 4 + 8)
    with torch.no_grad():
        simulation.limits[0] = resting + num_bytes(nn.Linear(8, 8)) + 3 * x.nbytes
        assert close(model(x), expected)
    assert simulation.used[0] == resting


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_no_memory_on_the_device(simulation, x, error):
    model = Model()

    def fail(*_):
        raise error

    bigload.attach_align_device_hook(model, execution_device=0, offload=True, preload_module_classes=["Model"])
    resting = simulation.used[0]
    model.second.forward = fail
    with pytest.raises(error):
        model(x)
    del fail
    assert simulation.used[0] == resting
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_a_device_that_is_too_small_is_empty_again_after_it_said_so(simulation, x):
    model = Model().eval()
    expected = model(x)
    bigload.attach_align_device_hook(model, execution_device=0, offload=True, preload_module_classes=["Model"])
    resting = simulation.used[0]
    simulation.limits[0] = resting + num_bytes(nn.Linear(8, 8))
    with pytest.raises(torch.OutOfMemoryError), torch.no_grad():
        model(x)
    assert simulation.used[0] == resting
    simulation.limits[0] = None
    with torch.no_grad():
        assert close(model(x), expected)


def test_a_hook_that_finds_no_room_leaves_weights_where_they_were(simulation):
    model = Model()
    simulation.limits[0] = num_bytes(model.first)
    with pytest.raises(torch.OutOfMemoryError):
        bigload.add_hook_to_module(model, bigload.AlignDevicesHook(0, place_submodules=True))
    assert {tensor.device.type for _, tensor in bigload.named_module_tensors(model, recurse=True)} == {"cpu"}
    assert simulation.used[0] == 0


def test_tied_weights_are_on_a_device_once(simulation, x):
    """Nested modules share the copy that the outer one loaded; what stays on the device is shared for good."""
    model = nn.ModuleDict({"stays": nn.Linear(8, 8, bias=False), "comes": nn.Linear(8, 8, bias=False)})
    model["comes"].inner = nn.Linear(8, 8, bias=False)
    model["comes"].inner.weight = model["comes"].weight
    model["also stays"] = nn.Linear(8, 8, bias=False)
    model["also stays"].weight = model["stays"].weight
    expected = model["comes"](x)
    ties = {model[name].weight.data_ptr(): {} for name in ("stays", "comes")}
    pointer = model["comes"].weight.data_ptr()
    for name in ("stays", "also stays"):
        bigload.add_hook_to_module(model[name], bigload.AlignDevicesHook(0, tied_params_map=ties))
    assert model["stays"].weight is model["also stays"].weight
    bigload.attach_align_device_hook(
        model["comes"], 0, offload=True, weights_map=model["comes"].state_dict(), tied_params_map=ties
    )
    outer = model["comes"]._old_forward
    model["comes"]._old_forward = lambda x: (model["comes"].inner(x), outer(x))[1]
    one = 8 * 8 * 4
    assert simulation.used[0] == one
    simulation.limits[0] = 2 * one + 4 * x.nbytes
    with torch.no_grad():
        assert close(model["comes"](x), expected)
    loads = [transfer for transfer in simulation.transfers if transfer.num_bytes == one]
    assert len(loads) == 2
    assert ties[pointer] == {}
    assert simulation.used[0] == one


def test_models_in_a_row_take_turns_on_one_device(simulation, x):
    models = [nn.Linear(8, 8) for _ in range(2)]
    expected = [model(x) for model in models]
    hooks, before = [], None
    for model in models:
        hook = CpuOffload(execution_device=0, prev_module_hook=before)
        bigload.add_hook_to_module(model, hook)
        before = UserCpuOffloadHook(model, hook)
        hooks.append(before)
    one = num_bytes(models[0])
    with torch.no_grad():
        simulation.limits[0] = one + 4 * x.nbytes
        for _ in range(2):
            for model, wanted in zip(models, expected, strict=True):
                assert close(model(x), wanted)
            hooks[1].offload()
    assert models[0].weight.device.type == "cpu"
    hooks[1].offload()
    assert simulation.used[0] == 0


def test_a_model_that_finds_no_room_goes_back_to_the_cpu(simulation, x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    bigload.add_hook_to_module(model, CpuOffload(execution_device=0))
    simulation.limits[0] = num_bytes(model[0])
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_a_copy_of_an_offloaded_model_comes_and_goes_by_itself(simulation, x):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    expected = model(x)
    bigload.attach_align_device_hook(model, execution_device=0, offload=True)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        assert close(copied(x), expected)
    assert simulation.used[0] == 0
    bigload.remove_hook_from_submodules(copied)
    assert copied[0].weight.device.type == "cpu"
    assert model[0].weight.is_meta
    with torch.no_grad():
        assert close(model(x), expected)


def test_weights_that_stay_on_another_device_are_lent_for_a_forward(simulation, x):
    layer = nn.Linear(8, 8)
    expected = layer(x)
    bigload.add_hook_to_module(layer, bigload.AlignDevicesHook(1, offload=True, io_same_device=True))
    stays = nn.Parameter(layer._hf_hook.weights_map["weight"].to(SIM[0]))
    layer.weight = stays
    with torch.no_grad():
        assert close(layer(x), expected)
    assert layer.weight is stays
    assert simulation.used[1] == 0
