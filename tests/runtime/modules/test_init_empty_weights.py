import threading

import pytest
import torch
from torch import nn

import bigload


class Scaled(nn.Parameter):
    def __new__(cls, data, requires_grad=True, scale=1.0):
        made = super().__new__(cls, data, requires_grad)
        made.scale = scale
        return made


@pytest.fixture(autouse=True)
def registration_is_left_as_it_was():
    before = nn.Module.register_parameter
    yield
    assert nn.Module.register_parameter is before


def devices(module):
    return {name: tensor.device.type for name, tensor in bigload.named_module_tensors(module, recurse=True)}


def test_parameters_go_to_the_meta_device_and_buffers_keep_their_values():
    with bigload.init_empty_weights():
        model = nn.BatchNorm1d(3)
        plain = torch.ones(2)
    assert set(devices(model).values()) == {"meta", "cpu"}
    assert model.weight.is_meta
    assert torch.equal(model.running_var, torch.ones(3))
    assert plain.device.type == "cpu"
    assert nn.Linear(1, 1).weight.device.type == "cpu"


def test_with_buffers_it_is_the_context_of_the_device_and_nothing_else():
    before = nn.Module.register_parameter
    with bigload.init_empty_weights(include_buffers=True):
        assert nn.Module.register_parameter is before
        model, plain = nn.BatchNorm1d(3), torch.ones(2)
    assert set(devices(model).values()) == {"meta"}
    assert plain.is_meta


@pytest.mark.parametrize(("text", "expected"), [("1", "meta"), ("TRUE", "meta"), ("no", "cpu"), ("0", "cpu")])
def test_the_environment_decides_about_buffers_if_nobody_else_does(monkeypatch, text, expected):
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", text)
    with bigload.init_empty_weights():
        model = nn.BatchNorm1d(3)
    assert model.running_var.device.type == expected
    with bigload.init_empty_weights(include_buffers=False):
        assert nn.BatchNorm1d(3).running_var.device.type == "cpu"


def test_an_environment_that_says_neither_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_INIT_INCLUDE_BUFFERS", "perhaps")
    with pytest.raises(ValueError, match="perhaps"), bigload.init_empty_weights():
        pass


@pytest.mark.parametrize("include_buffers", [False, True])
def test_a_device_may_be_named(include_buffers):
    with bigload.init_on_device("meta", include_buffers=include_buffers):
        assert nn.Linear(1, 1).weight.is_meta


def test_an_error_and_nesting_leave_registration_as_it_was():
    with pytest.raises(KeyError), bigload.init_empty_weights(), bigload.init_on_device(torch.device("cpu")):
        raise KeyError
    with bigload.init_empty_weights():
        with bigload.init_on_device(torch.device("cpu")):
            assert nn.Linear(1, 1).weight.device.type == "cpu"
        assert nn.Linear(1, 1).weight.is_meta


def test_other_threads_build_what_they_want_and_contexts_may_end_in_any_order():
    """accelerate leaves registration patched for good if the first context to begin is the first to end."""
    entered, other_left, built = threading.Event(), threading.Event(), []

    def other():
        with bigload.init_empty_weights():
            entered.set()
            assert other_left.wait(10)
            built.append(nn.Linear(1, 1).weight.device.type)

    with bigload.init_empty_weights():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(10)
    built.append(nn.Linear(1, 1).weight.device.type)
    other_left.set()
    thread.join()
    assert built == ["cpu", "meta"]


def test_a_wrapper_that_somebody_else_left_around_registration_is_not_undone(monkeypatch):
    seen = []
    before = nn.Module.register_parameter
    context = bigload.init_empty_weights()
    with context:
        inner = nn.Module.register_parameter
        theirs = lambda self, name, param: (seen.append(name), inner(self, name, param))[1]  # noqa: E731
        nn.Module.register_parameter = theirs
    try:
        assert nn.Module.register_parameter is theirs
        assert nn.Linear(1, 1).weight.device.type == "cpu"
        with bigload.init_empty_weights():
            assert nn.Linear(1, 1).weight.is_meta
        assert seen == ["weight", "bias"] * 2
    finally:
        nn.Module.register_parameter = before


def test_parameters_keep_class_attributes_and_requires_grad_and_are_not_changed_themselves():
    scaled = Scaled(torch.ones(2), requires_grad=False, scale=3.0)
    noted = nn.Parameter(torch.ones(2))
    noted.is_sharded = True
    before = dict(scaled.__dict__), dict(noted.__dict__)
    with bigload.init_empty_weights():
        model = nn.Module()
        model.scaled, model.noted = scaled, noted
        model.register_parameter("none", None)
    assert type(model.scaled) is Scaled
    assert (model.scaled.scale, model.scaled.requires_grad, model.noted.is_sharded) == (3.0, False, True)
    assert model.scaled.is_meta
    assert model.noted.is_meta
    assert (dict(scaled.__dict__), dict(noted.__dict__)) == before
    assert scaled.device.type == "cpu"


def test_ties_made_while_building_are_kept():
    """accelerate makes another parameter at every registration, so that a model is tied no more."""
    with bigload.init_empty_weights():
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
        model["b"].weight = model["a"].weight
        shared = nn.Parameter(torch.ones(2))
        model["a"].bias = model["c"].bias = shared
    assert bigload.find_tied_parameters(model) == [["a.weight", "b.weight"], ["a.bias", "c.bias"]]


def test_lazy_layers_stay_lazy():
    with bigload.init_empty_weights():
        layer = nn.LazyLinear(2)
    assert layer.has_uninitialized_params()
    assert layer.weight.device.type == "meta"
