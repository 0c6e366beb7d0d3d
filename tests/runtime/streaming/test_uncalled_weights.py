"""Weights that are taken without calling who has them are there as well."""

import copy

import pytest
import torch
from streamed_models import Layer, made, settled
from torch import nn
from torch.nn import functional

import bigload
from bigload.runtime.streaming.uncalled_weights import modules_read


class Reads(nn.Module):
    """Takes weights in its forward, in a method and in a method of that; others it only asks for their form."""

    def __init__(self):
        super().__init__()
        self.direct, self.by_method, self.deeper = nn.Linear(8, 8), nn.Linear(8, 8), nn.Embedding(8, 8)
        self.form, self.called, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.inner = nn.ModuleDict({"norm": nn.LayerNorm(8)})
        self.holder = nn.Module()
        self.holder.table = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        x = x.to(self.form.weight.dtype).reshape(-1, self.form.weight.shape[0])
        x = functional.linear(x, self.direct.weight, self.direct.bias) + self._more(x) + self.holder.table.weight[0]
        for layer in self.layers:
            x = layer(x)
        return self.called(self.form(x))

    def _more(self, x):
        return x @ self.by_method.weight.t() + self._most()

    def _most(self):
        return sum(self.deeper.weight.sum() for _ in range(1))

    def tie(self):
        self.never.weight.data.zero_()


def test_what_forward_and_its_methods_take_is_found_and_nothing_else():
    model = Reads()
    names = {module: name for name, module in model.named_modules()}
    found = {names[module] for module in modules_read(model)}
    assert found == {"direct", "by_method", "holder.table", "deeper"}
    assert modules_read(Layer()) == []


class Head(nn.Module):
    """Ends with the weight of its embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(x, self.table.weight)


@pytest.mark.parametrize(("kind", "given"), [(Reads, torch.linspace(-1, 1, 16).reshape(2, 8)), (Head, torch.arange(4))])
def test_a_model_that_takes_weights_of_its_children_computes_with_them(tmp_path, kind, given):
    plain = made(kind).eval()
    model = bigload.disk_offload(copy.deepcopy(plain), tmp_path, prefetch_bytes=2000, resident_bytes=0)
    with settled(model):
        for _ in range(2):
            assert torch.equal(model(given), plain(given))
