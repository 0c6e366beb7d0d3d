"""Models spread over two simulated accelerators, RAM and disk: mixed devices raise there, as on real ones."""

import copy
import gc
import logging
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
import simulated_accelerator
from bigload import dispatch_model, load_and_dispatch, load_checkpoint_and_dispatch
from bigload.errors import DispatchedModelError
from bigload.units import MIB

SIM = [torch.device("sim", index) for index in range(2)]
NAMES = ["one", "two", "three", "four"]
INPUT = torch.linspace(-1, 1, 128).reshape(2, 64)
NUM_BYTES = 64 * 64 * 4


def chain():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict((name, nn.Linear(64, 64, bias=False)) for name in NAMES))


def tied_chain(*names):
    model = chain()
    for name in names:
        getattr(model, name).weight = getattr(model, names[0]).weight
    return model


EXPECTED = chain()(INPUT).detach()


def assert_same(output, expected=EXPECTED, device="cpu"):
    assert output.device == torch.device(device)
    torch.testing.assert_close(output.detach().cpu(), expected)


@pytest.mark.parametrize(
    "devices",
    [[0, 0, 1, 1], ["sim:1", "cpu", "disk", "sim:0"], ["disk", "cpu", "cpu", 1], ["cpu", torch.device("sim", 1), 0, 0]],
    ids=str,
)
def test_an_output_is_where_the_input_was_wherever_the_model_is(devices, tmp_path, simulation):
    model = dispatch_model(chain(), dict(zip(NAMES, devices, strict=True)), offload_dir=tmp_path)
    assert_same(model(INPUT))
    assert_same(model(INPUT.to("sim:1")), device="sim:1")


@pytest.mark.parametrize("_", range(3))
def test_the_main_device_is_the_first_accelerator_of_the_map(_, simulation):
    model = dispatch_model(chain(), {"one": "cpu", "two": "sim:1", "three": "sim:0", "four": "cpu"})
    assert [model.one._hf_hook.execution_device, model.four._hf_hook.execution_device] == ["sim:1", "sim:1"]


@pytest.mark.parametrize("options", [{"prefetch": False}, {"prefetch_bytes": 0}], ids=str)
def test_offloaded_weights_leave_the_device_when_they_are_done(options, simulation, tmp_path):
    where = {"one": 0, "two": "cpu", "three": "disk", "four": "cpu"}
    model = dispatch_model(chain(), where, offload_dir=tmp_path, **options)
    assert simulation.used[0] == NUM_BYTES
    with torch.no_grad():
        model(INPUT)
    assert simulation.used[0] == NUM_BYTES
    assert simulation.peak[0] < 3 * NUM_BYTES
    assert [getattr(model, name).weight.is_meta for name in NAMES] == [False, True, True, True]


def test_weights_for_ram_come_off_an_accelerator(simulation):
    model = chain().to("sim:1")
    dispatch_model(model, {"one": 0, "two": "cpu", "three": "cpu", "four": "cpu"})
    assert simulation.used[:2] == [NUM_BYTES, 0]
    assert_same(model(INPUT))


@pytest.mark.parametrize(
    ("devices", "num_copies"),
    [([0, 0, 1, 0], [1, 1]), ([0, 1, 1, 0], [1, 2]), ([0, "cpu", 1, "cpu"], [1, 1]), ([0, 1, 1, "cpu"], [1, 2])],
    ids=str,
)
def test_tied_weights_have_one_copy_on_each_device(devices, num_copies, simulation):
    model = tied_chain("one", "two", "four")
    expected = model(INPUT).detach()
    dispatch_model(model, dict(zip(NAMES, devices, strict=True)))
    assert simulation.used[:2] == [count * NUM_BYTES for count in num_copies]
    with torch.no_grad():
        assert_same(model(INPUT), expected)
    assert simulation.used[:2] == [count * NUM_BYTES for count in num_copies]
    there = [getattr(model, name).weight for name in ("one", "two", "four")]
    assert len({id(weight) for weight in there}) == len({weight.device for weight in there})


def test_a_model_on_one_device_is_moved_there(simulation):
    model = dispatch_model(chain(), dict.fromkeys(NAMES, 1))
    assert {parameter.device for parameter in model.parameters()} == {SIM[1]}
    assert not hasattr(model, "_hf_hook")


@pytest.fixture
def makes_new_parameters(simulation, monkeypatch):
    """A kind of device on which `Module.to` makes new parameters: data of the CPU's cannot become data there."""
    monkeypatch.setattr(nn.Module, "_apply", simulated_accelerator._apply_elsewhere)
    plain = tied_chain("one", "three").to("sim:0")
    assert plain.one.weight is not plain.three.weight, "what is to be faked"


@pytest.mark.parametrize("places", [[0, 0, 0, 0], [0, 1, 0, 1], ["cpu", 0, 0, 0]], ids=str)
def test_tied_weights_are_one_parameter_where_moving_makes_new_ones(makes_new_parameters, places):
    model = dispatch_model(tied_chain("one", "three"), dict(zip(NAMES, places, strict=True)))
    assert model.one.weight is model.three.weight
    given = INPUT.to("sim:0")
    assert_same(model(given), tied_chain("one", "three")(INPUT).detach(), device="sim:0")


def test_a_model_that_comes_when_it_runs_stays_tied(makes_new_parameters):
    model, hook = bigload.cpu_offload_with_hook(tied_chain("one", "three"), 0)
    assert_same(model(INPUT), tied_chain("one", "three")(INPUT).detach(), device="sim:0")
    assert model.one.weight is model.three.weight
    hook.offload()
    assert model.one.weight is model.three.weight


def test_moving_a_model_on_two_devices_warns(simulation, caplog):
    model = dispatch_model(chain(), {"one": 0, "two": 0, "three": 1, "four": 1})
    with caplog.at_level(logging.WARNING, "bigload"):
        assert model.to(torch.float32) is model
        assert not caplog.records
        model.to("cpu")
    assert "remove_hook_from_submodules" in caplog.text


def test_moving_a_model_with_offloaded_parts_says_why_not(simulation):
    model = dispatch_model(chain(), {"one": 0, "two": "cpu", "three": 0, "four": 0})
    with pytest.raises(DispatchedModelError, match=r"two\.weight"):
        model.to(0)


class Located(nn.Sequential):
    @property
    def device(self):
        return next(parameter.device for parameter in self.parameters())


@pytest.mark.parametrize("prefetch", [False, True])
def test_an_offloaded_model_names_the_device_where_it_runs(simulation, prefetch):
    model = Located(chain())
    bigload.cpu_offload(model, 1, prefetch=prefetch)
    assert model.device == SIM[1]
    assert_same(model(INPUT.to(model.device)), device="sim:1")


def test_copies_of_a_dispatched_model_are_dispatched(simulation):
    model = dispatch_model(chain(), {"one": 0, "two": "cpu", "three": 1, "four": 0})
    copied = copy.deepcopy(model)
    bigload.remove_hook_from_submodules(model)
    assert_same(copied(INPUT))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.full((64,), 0.5))
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x) * self.gate


@pytest.mark.parametrize("devices", [[1, "cpu", 0], ["cpu", 1, 0], ["disk", 0, "cpu"]], ids=str)
def test_a_split_module_runs_where_its_own_parameter_lives(devices, tmp_path, simulation):
    model = nn.Sequential(Gate(), nn.Linear(64, 64))
    expected = model(INPUT)
    names = ["0.gate", "0.inner", "1"]
    dispatch_model(model, dict(zip(names, devices, strict=True)), offload_dir=tmp_path)
    assert_same(model(INPUT), expected)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(8.0), persistent=False)
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.first(x) * self.scale)


def test_a_scalar_that_a_split_module_owns_stays_in_ram(simulation):
    model = nn.Sequential(Scaled())
    expected = model(INPUT)
    dispatch_model(model, {"0.first": 0, "0.last": 1, "0.scale": 1})
    assert_same(model(INPUT), expected)
    assert model[0].scale.device.type == "cpu"


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file(chain().state_dict(), folder / "model.safetensors")
    return folder


def empty():
    with bigload.init_empty_weights():
        return chain()


@pytest.mark.parametrize("devices", [[0, 0, 1, 1], [1, "cpu", "disk", 0], ["disk", "disk", "disk", 0]], ids=str)
def test_a_checkpoint_goes_where_its_parts_run(devices, folder, simulation):
    where = dict(zip(NAMES, devices, strict=True))
    model = load_checkpoint_and_dispatch(empty(), folder, where, strict=True)
    assert simulation.used[:2] == [devices.count(index) * NUM_BYTES for index in range(2)]
    assert simulation.peak[:2] == simulation.used[:2], "nothing was there twice"
    assert_same(model(INPUT))


def test_a_plan_for_cuda_is_carried_out_on_the_accelerators_of_this_machine(folder, tmp_path, simulation):
    overhead = 512 * MIB  # what plans count for a process on each accelerator
    plan = bigload.plan(folder, {"cuda:0": overhead + 2 * NUM_BYTES, "cuda:1": overhead + 2 * NUM_BYTES})
    out = tmp_path / "resharded"
    bigload.reshard(plan, out)
    for source in (plan, out):
        model = load_and_dispatch(empty(), source)
        assert set(model.hf_device_map.values()) == {0, 1}
        assert simulation.used[:2] == [2 * NUM_BYTES] * 2
        assert_same(model(INPUT))
        del model
        gc.collect()  # a module and the forward that a hook put in place of its own hold each other


def test_a_map_made_by_name_uses_all_accelerators(folder, simulation):
    limits = {0: 3 * NUM_BYTES, 1: 3 * NUM_BYTES, "cpu": "1GiB"}
    model = load_checkpoint_and_dispatch(empty(), folder, "auto", max_memory=limits)
    assert set(model.hf_device_map.values()) == {0, 1}
    assert_same(model(INPUT))


class Rotary(nn.Module):
    """A module with values that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(64, 64)
        self.register_buffer("angles", torch.linspace(0, 1, 64), persistent=False)

    def forward(self, x):
        return self.proj(x) * self.angles


@pytest.mark.parametrize("where", [{"": 0}, {"0": 0, "1": 1}, {"0": "cpu", "1": 0}], ids=str)
def test_values_that_no_checkpoint_has_come_along(where, tmp_path, simulation):
    plain = nn.Sequential(Rotary(), Rotary())
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with bigload.init_empty_weights():
        model = nn.Sequential(Rotary(), Rotary())
    load_checkpoint_and_dispatch(model, tmp_path, where, strict=True)
    device = "sim:0" if len(where) == 1 else "cpu"
    assert_same(model(INPUT.to(device)), plain(INPUT), device=device)
