"""A dispatched model refuses moves, casts and values that its offloaded weights would not take part in."""

import copy
import logging

import pytest
import torch
from torch import nn

import bigload
from bigload.errors import DispatchedModelError

INPUT = torch.linspace(-1, 1, 8).reshape(2, 4)
HALF = {"first": "disk", "norm": "cpu", "last": "cpu"}


class Model(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.last = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


OFFLOADS = {
    "half": lambda folder, **options: bigload.dispatch_model(Model(), HALF, offload_dir=folder, **options),
    "disk": lambda folder, **options: bigload.disk_offload(Model(), folder, **options),
    "cpu": lambda _, **options: bigload.cpu_offload(Model(), **options),
}


@pytest.fixture(params=[True, False], ids=["prefetch", "by module"])
def prefetch(request):
    return request.param


@pytest.fixture(params=OFFLOADS)
def model(request, prefetch, tmp_path):
    return OFFLOADS[request.param](tmp_path, prefetch=prefetch)


def values(model):
    """Return what is in memory of `model`."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if not tensor.is_meta}


def assert_unchanged(model, before):
    after = values(model)
    assert before.keys() == after.keys()
    assert all(
        torch.equal(after[name], tensor) and after[name].dtype == tensor.dtype for name, tensor in before.items()
    )
    assert torch.equal(model(INPUT), Model()(INPUT))


@pytest.mark.parametrize("move", [lambda model: model.to("cpu"), lambda model: model.cpu(), lambda model: model.cuda()])
@pytest.mark.sample(6)
def test_moving_says_why_not(model, move, caplog):
    with (
        caplog.at_level(logging.WARNING, "bigload"),
        pytest.raises(DispatchedModelError, match=r"first\.weight") as error,
    ):
        move(model)
    assert "remove_hook_from_submodules" in caplog.text
    assert isinstance(error.value, RuntimeError)


@pytest.mark.parametrize(
    "cast",
    [
        lambda model: model.half(),
        lambda model: model.bfloat16(),
        lambda model: model.double(),
        lambda model: model.type(torch.float16),
        lambda model: model.type("torch.DoubleTensor"),
        lambda model: model.to(torch.float64),
        lambda model: model.to(dtype=torch.bfloat16),
    ],
)
@pytest.mark.sample(14)
def test_casting_says_why_not_and_changes_nothing(model, cast):
    before = values(model)
    with pytest.raises(DispatchedModelError, match=r"(?s)cast.*first\.weight.*dtype"):
        cast(model)
    assert_unchanged(model, before)


@pytest.mark.parametrize("cast", [lambda model: model.float(), lambda model: model.to(torch.float32)])
@pytest.mark.sample(4)
def test_a_cast_that_changes_no_offloaded_weight_is_done(model, cast):
    before = values(model)
    assert cast(model) is model
    assert_unchanged(model, before)


def test_casting_is_possible_when_the_hooks_are_gone(model):
    bigload.remove_hook_from_submodules(model)
    assert torch.equal(model.half().float()(INPUT), Model().half().float()(INPUT))


@pytest.mark.parametrize("prefix", ["", "inner."])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.sample(8)
def test_other_values_for_offloaded_weights_are_refused_before_any_is_taken(model, strict, prefix):
    before = values(model)
    state = {f"{prefix}{name}": tensor for name, tensor in Model(seed=1).state_dict().items()}
    target = nn.ModuleDict({"inner": model}) if prefix else model
    with pytest.raises(DispatchedModelError, match=r"(?s)load_state_dict.*first\.weight.*remove_hook_from_submodules"):
        target.load_state_dict(state, strict=strict)
    assert_unchanged(model, before)


@pytest.mark.parametrize("where", ["first", "last", "last.1"])
def test_parts_refuse_other_values_as_well(tmp_path, where):
    model = bigload.disk_offload(Model(), tmp_path)
    with pytest.raises(DispatchedModelError):
        model.get_submodule(where).load_state_dict(Model(seed=1).get_submodule(where).state_dict())


def test_a_bare_offloading_hook_refuses_other_values():
    layer = nn.Linear(4, 4)
    bigload.add_hook_to_module(layer, bigload.AlignDevicesHook("cpu", offload=True))
    with pytest.raises(DispatchedModelError):
        layer.load_state_dict(nn.Linear(4, 4).state_dict())


def test_values_of_what_stays_are_loaded(tmp_path):
    model = bigload.dispatch_model(Model(), HALF, offload_dir=tmp_path)
    other = Model(seed=1)
    model.load_state_dict({name: value for name, value in other.state_dict().items() if "last" in name}, strict=False)
    expected = Model()
    expected.last.load_state_dict(other.last.state_dict())
    assert torch.equal(model(INPUT), expected(INPUT))


def test_other_values_can_be_assigned(model):
    other = Model(seed=1)
    model(INPUT)
    model.load_state_dict(other.state_dict(), assign=True)
    for _ in range(2):
        assert torch.equal(model(INPUT), other(INPUT))


def test_the_model_can_take_other_values_when_the_hooks_are_gone(model):
    bigload.remove_hook_from_submodules(model)
    model.load_state_dict(Model(seed=1).state_dict())
    assert torch.equal(model(INPUT), Model(seed=1)(INPUT))


EDITS = {
    "init": nn.init.zeros_,
    "add": lambda weight: weight.add_(1),
    "copy": lambda weight: weight.copy_(torch.zeros(4, 4)),
    "index": lambda weight: weight.__setitem__(0, 0),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.sample(8)
def test_an_edit_of_an_offloaded_weight_is_refused_and_nothing_changes(model, edit):
    for _ in range(2):  # before the first forward, and after it
        with torch.no_grad(), pytest.raises(bigload.AbsentWeightError, match=r"first\.weight"):
            EDITS[edit](model.first.weight)
        assert torch.equal(model(INPUT), Model()(INPUT))


def test_models_made_without_memory_have_no_edits_of_their_initialization(tmp_path, prefetch):
    bigload.offload_state_dict(tmp_path, Model().state_dict())
    with torch.device("meta"):
        model = Model()
    assert model.first.weight._version
    bigload.disk_offload(model, tmp_path, prefetch=prefetch)
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each(INPUT), Model()(INPUT))


def test_models_dispatched_in_inference_mode_run(tmp_path, prefetch):
    with torch.inference_mode():
        model = bigload.disk_offload(Model(), tmp_path, prefetch=prefetch)
        assert torch.equal(model(INPUT), Model()(INPUT))


def test_nothing_remains_when_the_hooks_are_gone(model):
    bigload.remove_hook_from_submodules(model)
    for module, other in zip(model.modules(), Model().modules(), strict=True):
        assert module.__dict__.keys() - {"hf_device_map"} == other.__dict__.keys()
