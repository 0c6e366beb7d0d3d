"""Gradients through offloaded weights are right; gradients of them are refused, however they are asked for."""

import copy
import warnings
from functools import partial

import pytest
import torch
from streamed_models import IDS, made, save, settled, streamed
from torch import nn
from torch.utils.checkpoint import checkpoint

import bigload

WAYS = [{}, {"prefetch_bytes": 3000, "resident_bytes": 0}, {"prefetch": False}]
pytestmark = pytest.mark.parametrize("options", WAYS, ids=["all stay", "small window", "no prefetch"])


class Adapted(nn.Module):
    """A layer with a trained detour around it, as adapters are."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.full((2, 8), 0.1))
        self.b = nn.Parameter(torch.full((8, 2), 0.2))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


@pytest.fixture(scope="module")
def plain():
    return made().eval()


@pytest.fixture
def model(plain, tmp_path, options):
    return streamed(save(plain, tmp_path / "checkpoint"), **options)


def x():
    torch.manual_seed(1)
    return torch.randn(2, 3, 8, requires_grad=True)


def test_gradients_of_inputs_are_those_of_the_plain_model(plain, model):
    model.requires_grad_(False)
    frozen = copy.deepcopy(plain).requires_grad_(False)
    found, expected = x(), x()
    with settled(model):
        for _ in range(2):
            model(found).square().sum().backward()
            frozen(expected).square().sum().backward()
        assert torch.equal(found.grad, expected.grad)
        (alone,) = torch.autograd.grad(model(found).sum(), found)
    assert torch.equal(alone, torch.autograd.grad(frozen(expected).sum(), expected)[0])


@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.sample(3)
def test_gradients_of_adapters_are_those_of_the_plain_model(plain, model, reentrant):
    twins = [model, copy.deepcopy(plain)]
    for twin in twins:
        twin.requires_grad_(False)
        twin.layers[2] = Adapted(twin.layers[2])
        if reentrant is not None:
            for number, layer in enumerate(twin.layers):
                inner = layer.forward
                layer.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=reentrant)
                assert number < 6
        optimizer = torch.optim.SGD([twin.layers[2].a, twin.layers[2].b], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            twin(x()).square().sum().backward()
            optimizer.step()
    assert twins[0].layers[2].a.grad.abs().sum() > 0
    for name in ("a", "b"):
        assert torch.equal(getattr(twins[0].layers[2], name), getattr(twins[1].layers[2], name))


def test_a_forward_alone_is_no_training(plain, model):
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model(IDS), plain(IDS))
    point = x()
    (found,) = torch.autograd.grad(model(point).sum(), point)
    assert torch.equal(found, torch.autograd.grad(plain(point).sum(), point)[0])


@pytest.mark.parametrize("asked", ["backward", "grad", "in inputs"])
@pytest.mark.sample(3)
def test_a_gradient_of_an_offloaded_weight_is_refused(model, asked, monkeypatch):
    seen, linear = [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight, bias: seen.append(weight) or linear(x, weight, bias))
    with settled(model):
        for _ in range(2):
            seen.clear()
            loss = model(IDS).sum()
            ask = {
                "backward": loss.backward,
                "grad": partial(torch.autograd.grad, loss, seen[2]),
                "in inputs": partial(loss.backward, inputs=[seen[2]]),
            }
            with pytest.raises(bigload.DispatchedModelError, match=r"head|layers\.\d|embed") as caught:
                ask[asked]()
            assert "requires_grad_(False)" in str(caught.value)
            names = [name for name, _ in model.named_parameters()]
            assert caught.value.names[0] in (["layers.1.up.weight"] if asked != "backward" else names)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_some_may_be_frozen_and_others_not(model):
    model.requires_grad_(False)
    model.layers[3].down.bias.requires_grad_(True)
    with pytest.raises(bigload.DispatchedModelError, match=r"layers\.3\.down\.bias"):
        model(IDS).sum().backward()
    model.layers[3].down.bias.requires_grad_(False)
    point = x()
    model(point).sum().backward()
    assert point.grad is not None


def test_weights_that_stay_can_be_trained_beside_offloaded_ones(plain, tmp_path, options):
    trained = [
        bigload.dispatch_model(
            copy.deepcopy(plain), {"embed": "cpu", "layers": "disk", "head": "cpu"}, offload_dir=tmp_path, **options
        ),
        copy.deepcopy(plain),
    ]
    for model in trained:
        for layer in model.layers:
            layer.requires_grad_(False)
        optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(IDS).square().sum().backward()
            optimizer.step()
    assert torch.equal(trained[0](IDS), trained[1](IDS))
    assert torch.equal(trained[0].embed.weight, trained[1].embed.weight)


def test_copies_of_a_weight_that_is_there_warn_of_nothing(model):
    copies = []
    model.layers[1].up.register_forward_hook(lambda module, *_: copies.append(copy.deepcopy(module.weight)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IDS)
    assert not copies[0]._backward_hooks
