"""Modules put around offloaded ones after dispatch. PEFT's adapters: `tests/conformance/test_adapters.py`."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import bigload

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Adapter(nn.Module):
    """Adds to a layer something that begins with values of its weight, lies where that is, and uses it directly."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.low = nn.Parameter(layer.weight.detach()[:2].clone())

    def forward(self, x):
        return self.layer(x) + (x @ self.low.T).sum(-1, keepdim=True) * self.layer.weight.norm()


class Scaled(nn.Module):
    """Takes half of a layer's weight out of it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        with torch.no_grad():
            layer.weight.mul_(0.5)

    def forward(self, x):
        return self.layer(x)


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))


def wrapped(model, kind=Adapter):
    model[0] = kind(model[0])
    model[1][0] = kind(model[1][0])
    return model


@pytest.fixture(params=["cpu", "disk"])
def offload(request, tmp_path):
    def offloaded(model, **options):
        if request.param == "cpu":
            return bigload.cpu_offload(model, state_dict=copy.deepcopy(model.state_dict()), **options)
        return bigload.disk_offload(model, tmp_path, **options)

    return offloaded


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_wrapper_computes_with_the_weights_that_it_is_around(offload, prefetch):
    model, plain = wrapped(offload(made(), prefetch=prefetch)), wrapped(made())
    for each in (model, copy.deepcopy(model)):
        for _ in range(2):
            assert torch.equal(each(X), plain(X))
    assert not model[0].low.is_meta
    assert model[0].layer.weight.is_meta


def test_a_wrapper_trains(offload):
    model, plain = offload(made()), made()
    gradients = []
    for each in (wrapped(model.requires_grad_(False)), wrapped(plain.requires_grad_(False))):
        each(X).sum().backward()
        gradients.append([each[0].low.grad, each[1][0].low.grad])
    for found, expected in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("prefetch", [False, True])
def test_what_a_wrapper_changes_in_a_weight_stays(offload, prefetch):
    model, plain = wrapped(offload(made(), prefetch=prefetch), Scaled), wrapped(made(), Scaled)
    for _ in range(2):
        assert torch.equal(model(X), plain(X))


def test_weights_are_there_for_the_module_that_was_wrapped_last_alone(offload):
    model = wrapped(offload(made()))
    assert model[0].layer.weight.is_meta
    assert not model[1][0].layer.weight.is_meta
    model(X)
    assert model[1][0].layer.weight.is_meta


def test_a_weight_that_is_frozen_meanwhile_stays_frozen(offload):
    model = wrapped(offload(made()))
    for parameter in model.parameters():
        parameter.requires_grad = False
    model(X)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_map_says_where_additions_are(tmp_path):
    model = bigload.dispatch_model(made(), {"0": "disk", "1": "cpu", "2": "cpu"}, offload_dir=tmp_path)
    wrapped(model)
    assert model.hf_device_map["0"] == torch.device("cpu")
    assert model.hf_device_map["0.layer"] == "disk"


def test_a_wrapped_model_is_freed_with_its_last_reference(offload):
    model = wrapped(offload(made()))
    gone = weakref.ref(model[1][0].layer.weight)
    del model
    gc.collect()
    assert gone() is None


def test_wrappers_are_of_use_when_the_hooks_are_gone(offload):
    model, plain = wrapped(offload(made())), wrapped(made())
    bigload.remove_hook_from_submodules(model)
    assert torch.equal(model(X), plain(X))


def test_a_wrapper_of_several_modules_brings_each_when_it_runs(offload):
    model, seen = offload(made(), prefetch=False), []
    both = nn.Sequential(model[0], model[2])
    both[1].register_forward_pre_hook(lambda *_: seen.append(both[0].weight.is_meta))
    both(X)
    assert seen == [True]
