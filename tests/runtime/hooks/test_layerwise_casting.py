import pytest
import torch
from torch import nn

import bigload


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Conv1d(4, 4, 1)])
        self.seen = []

    def forward(self, x):
        x = self.norm(self.embed(x))
        return self.blocks[1](self.blocks[0](x)[..., None])


def dtypes(model):
    return {name: parameter.dtype for name, parameter in model.named_parameters() if name.endswith("weight")}


def stored(model, storage=torch.float8_e4m3fn, **options):
    bigload.attach_layerwise_casting_hooks(model, storage, torch.float32, **options)
    return {name.removesuffix(".weight") for name, dtype in dtypes(model).items() if dtype == storage}


def test_large_layers_are_stored_in_one_dtype_and_compute_in_another():
    model, x = Model(), torch.randn(2, 3)
    assert stored(model, torch.bfloat16) == {"embed", "blocks.0", "blocks.1"}
    seen = []
    forward = model.embed._old_forward
    model.embed._old_forward = lambda x: seen.append(model.embed.weight.dtype) or forward(x)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    assert model(x).dtype == torch.float32
    assert seen == [torch.float32]
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("pattern", ["blocks", ["blocks"], ("^blocks$", "none")])
def test_patterns_leave_out_modules_and_all_in_them(pattern):
    """accelerate takes a pattern that is one text for as many patterns as it has letters."""
    assert stored(Model(), skip_modules_pattern=pattern) == {"embed"}


def test_classes_can_be_left_out_and_a_layer_may_come_alone():
    assert stored(Model(), skip_modules_classes=(nn.ModuleList, nn.LayerNorm)) == {"embed"}
    layer = nn.Linear(2, 2)
    assert stored(layer) == {"weight"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_forward_that_raises_leaves_layers_as_they_are_stored(error):
    model = Model()
    stored(model, torch.bfloat16)

    def fail(*_):
        raise error

    model.blocks[0]._old_forward = fail
    before = dtypes(model)
    with pytest.raises(error):
        model(torch.ones(2, 3))
    assert dtypes(model) == before


def test_a_cast_that_fails_half_way_is_undone(monkeypatch):
    layer = nn.Linear(2, 2)
    stored(layer, torch.bfloat16)
    to = nn.Linear.to

    def half_way(module, dtype, **options):
        if dtype == torch.float32:
            module.weight.data = module.weight.data.float()
            raise torch.OutOfMemoryError("no room")
        return to(module, dtype=dtype, **options)

    monkeypatch.setattr(nn.Linear, "to", half_way)
    with pytest.raises(torch.OutOfMemoryError):
        layer(torch.ones(2))
    assert layer.weight.dtype == torch.bfloat16


def test_a_generator_computes_in_the_dtype_for_that():
    class Streams(nn.Linear):
        def forward(self, x):
            yield super().forward(x)

    layer = Streams(2, 2)
    stored(layer, torch.bfloat16)
    (output,) = layer(torch.ones(2))
    assert output.dtype == torch.float32
    assert layer.weight.dtype == torch.bfloat16


def test_casts_and_offload_go_together():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    expected = layer(x)
    bigload.attach_align_device_hook(layer, "cpu", offload=True)
    stored(layer, torch.bfloat16)
    assert torch.allclose(layer(x), expected, atol=0.05)
    assert layer.weight.is_meta
    assert layer.weight.dtype == torch.bfloat16
