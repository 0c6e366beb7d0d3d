"""Models without their weights arrive with the same modules, ties and hooks, and say what cannot travel."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from bigload.errors import ModelNotSendableError
from bigload.parallel.workers.model_skeleton import make_skeleton
from worker_models import TwoLayers


def rebuilt(model):
    skeleton, weights = make_skeleton(model)
    return skeleton.build(dict(enumerate(weights)))


def test_a_model_is_built_again_with_the_values_that_are_given():
    model = TwoLayers()
    again = rebuilt(model)
    assert type(again) is TwoLayers
    assert torch.equal(again(torch.ones(8)), model(torch.ones(8)))
    assert not any(parameter.requires_grad for parameter in again.parameters())


def test_weights_that_are_not_given_have_forms_and_no_memory():
    skeleton, weights = make_skeleton(TwoLayers(512))
    assert len(skeleton.message.pickled) < 5000
    assert not skeleton.message.tensors
    number = next(number for number, form in enumerate(skeleton.weights) if form.names == ("down.weight",))
    model = skeleton.build({number: weights[number]})
    assert [name for name, tensor in model.state_dict().items() if not tensor.is_meta] == ["down.weight"]


def test_forms_tell_names_and_what_a_state_dict_has():
    skeleton, _ = make_skeleton(TwoLayers())
    forms = {form.names[0]: (form.is_parameter, form.is_stored) for form in skeleton.weights}
    assert forms["up.weight"] == (True, True)
    assert forms["scale"] == (False, True)
    assert forms["shift"] == (False, False)


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    skeleton, _ = make_skeleton(model)
    assert ("0.weight", "1.weight") in [form.names for form in skeleton.weights]
    again = skeleton.build({})
    assert again[0].weight is again[1].weight


def test_weight_norm_travels_and_leaves_the_model_as_it_is():
    model = nn.Sequential(parametrizations.weight_norm(nn.Conv1d(2, 4, 3), dim=2), nn.ReLU())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = rebuilt(model)
    x = torch.randn(1, 2, 8)
    assert torch.equal(again(x), model(x))
    assert again.state_dict().keys() == before.keys()
    assert type(again[0]).__name__ == type(model[0]).__name__
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_weight_norm_of_older_torch_travels_too():
    with pytest.warns(FutureWarning):
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(3, 2)))
    assert torch.equal(rebuilt(model)(torch.ones(3)), model(torch.ones(3)))


def test_hooks_of_parts_travel_and_those_of_the_model_stay():
    model = nn.Sequential(nn.Identity())
    model.register_forward_hook(lambda module, args, output: output * 100)  # which could not be pickled
    model.register_state_dict_post_hook(lambda *_: None)
    model[0].register_forward_hook(negate)
    assert rebuilt(model)(torch.ones(1)).item() == -1


def negate(module, args, output):
    return -output


class Locked(nn.Module):
    def __init__(self):
        super().__init__()
        self.guard = threading.Lock()


def test_what_cannot_be_pickled_is_named():
    with pytest.raises(ModelNotSendableError, match=r"guard of 1 \(Locked\): it cannot be pickled") as caught:
        make_skeleton(nn.Sequential(nn.ReLU(), Locked()))
    assert "locks" in caught.value.hint


def test_a_function_of_the_script_is_refused_as_a_class_is():
    def activation(x):
        return x

    activation.__module__, activation.__qualname__ = "__main__", "activation"
    model = nn.Sequential(nn.ReLU())
    model.activation = activation
    with pytest.raises(ModelNotSendableError, match="activation is defined in the script or notebook"):
        make_skeleton(model)
