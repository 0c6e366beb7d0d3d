"""Blocks and experts of a model, which together are all of it."""

import copy

import pytest
import torch
from streamed_models import Layer, Model, made, settled
from torch import nn

import bigload
from bigload.runtime.streaming.blocks import cut_into_blocks


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    """Experts as separate modules, one of which all tokens use, and which of the others is said by a router."""

    def __init__(self, num_experts=4):
        super().__init__()
        self.gate = nn.Linear(8, num_experts)
        self.experts = nn.ModuleList(Mlp() for _ in range(num_experts))
        self.shared_experts = nn.ModuleList(Mlp() for _ in range(2))
        self.shared_expert = Mlp()

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        routed = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            routed[chosen == number] = self.experts[number](x[chosen == number])
        return routed + sum(expert(x) for expert in self.shared_experts) + self.shared_expert(x)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(8), Mixture()

    def forward(self, x):
        return x + self.mixture(self.norm(x))


class Mixtures(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        self.layers = nn.ModuleList(Decoder() for _ in range(num_layers))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stacked(nn.Module):
    """All experts in one parameter."""

    def __init__(self):
        super().__init__()
        self.experts = nn.Module()
        self.experts.up = nn.Parameter(torch.randn(4, 8, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x @ self.experts.up[0])


def names_of(model):
    return {part.name: part.is_routed for part in cut_into_blocks(model)}


def assert_covers(model):
    """Every module is a member of one part, except those without tensors around blocks."""
    members = [id(module) for part in cut_into_blocks(model) for module in part.members]
    assert len(members) == len(set(members))
    assert all(
        id(module) in members
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
        or next(module.buffers(recurse=False), None) is not None
    )


def test_layers_are_blocks_and_what_is_around_them_is_cut_down_to_what_owns_tensors():
    assert list(names_of(Model(2))) == ["", "embed", "layers.0", "layers.1", "head"]
    assert_covers(Model(2))


def test_siblings_of_one_class_are_blocks_without_being_told():
    assert list(names_of(nn.Sequential(nn.Linear(2, 2), Layer(), Layer()))) == ["", "0", "1", "2"]
    model = nn.Sequential(nn.Linear(2, 2), Layer(), Mlp())
    assert list(names_of(model)) == ["", "0", "1", "1.up", "1.down", "2", "2.up", "2.down"]


def test_lists_of_lists_are_stages_whose_elements_are_blocks():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.down = nn.ModuleList([Layer(), Layer()]), nn.Linear(8, 8)

    model = nn.ModuleDict({"stages": nn.ModuleList([Stage(), Stage()])})
    names = list(names_of(model))
    assert [name for name in names if name.count(".") == 3] == [
        f"stages.{i}.blocks.{j}" for i in (0, 1) for j in (0, 1)
    ]
    assert "stages.0.down" in names
    assert_covers(model)


def test_experts_are_blocks_of_their_own_and_shared_ones_belong_to_the_layer():
    model = Mixtures(2)
    names = names_of(model)
    assert [name for name, is_routed in names.items() if is_routed] == [
        f"layers.{layer}.mixture.experts.{number}" for layer in (0, 1) for number in range(4)
    ]
    members = next(part for part in cut_into_blocks(model) if part.name == "layers.0").members
    mixture = model.layers[0].mixture
    assert {mixture.shared_expert.up, mixture.shared_experts[1].down, mixture.gate} <= set(members)
    assert mixture.experts[0].up not in members
    assert_covers(model)


def test_experts_outside_of_any_block_are_routed_as_well():
    names = names_of(nn.ModuleDict({"experts": nn.ModuleList([Mlp(), Mlp()]), "norm": nn.LayerNorm(8)}))
    assert names == {"": False, "experts.0": True, "experts.1": True, "norm": False}


def test_experts_in_one_parameter_belong_to_their_block():
    model = nn.ModuleList([Stacked(), Stacked()])
    assert set(names_of(model).values()) == {False}
    assert model[0].experts in next(part for part in cut_into_blocks(model) if part.name == "0").members


def test_experts_within_experts_belong_to_the_outer_ones():
    class Nested(Mlp):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([Mlp(), Mlp()])

    model = nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([Nested(), Nested()])}) for _ in range(2)])
    assert_covers(model)


def test_a_module_with_several_names_is_one_block():
    shared = Layer()
    model = nn.ModuleDict({"a": nn.ModuleList([shared, Layer()]), "b": nn.ModuleList([shared, Layer()])})
    assert [part.name for part in cut_into_blocks(model) if part.module is shared] == ["a.0"]
    assert_covers(model)


@pytest.mark.parametrize("resident_bytes", [0, 3000])
def test_only_the_experts_that_tokens_were_routed_to_are_brought(tmp_path, resident_bytes):
    plain = made(Mixtures).eval()
    model = bigload.dispatch_model(
        copy.deepcopy(plain), {"": "disk"}, offload_dir=tmp_path, prefetch_bytes=2000, resident_bytes=resident_bytes
    )
    called = []
    for name, module in plain.named_modules():
        if isinstance(module, Mlp) and ".experts." in name:
            module.register_forward_hook(lambda *_, name=name: called.append(name))
    torch.manual_seed(3)
    tokens = torch.randn(2, 8)
    expected = plain(tokens)
    with settled(model):
        assert torch.equal(model(tokens), expected)
        fetched = [
            span.name for span in model.bigload_stats().spans if span.kind == "fetch" and ".experts." in span.name
        ]
        assert sorted(fetched) == sorted(set(called))
        for _ in range(3):
            assert torch.equal(model(tokens), expected)
        again = [span.name for span in model.bigload_stats().spans if span.kind == "fetch" and ".experts." in span.name]
    assert set(again) == set(called)
    assert len(again) < 4 * len(fetched) if resident_bytes else len(again) == 4 * len(fetched)
