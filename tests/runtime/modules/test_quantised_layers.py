"""Quantised layers compute with weights that are brought for each forward, or are refused before anything is loaded."""

import copy
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.runtime.modules.passing_forward import PassingForward


class FP8Linear(nn.Linear):
    """Stands for the class of transformers, which is told by its name."""


def test_a_model_that_is_not_quantised_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(2, 2))
    assert bigload.prepare_quantised(model) is model
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("offload", [bigload.disk_offload, lambda model, _: bigload.cpu_offload(model)])
def test_layers_that_need_an_accelerator_are_refused_on_the_cpu(tmp_path, offload):
    model = nn.Sequential(nn.Linear(2, 2), FP8Linear(2, 2))
    with pytest.raises(bigload.LoadError, match="FP8Linear does not compute on cpu, where 1 layer") as refused:
        offload(model, tmp_path / "off")
    assert "1" in refused.value.details
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not (tmp_path / "off").exists()


def test_layers_that_need_an_accelerator_are_refused_before_a_checkpoint_is_read(tmp_path):
    save_file(nn.Sequential(FP8Linear(2, 2)).state_dict(), tmp_path / "model.safetensors")
    with bigload.init_empty_weights():
        model = nn.Sequential(FP8Linear(2, 2))
    for device in ("disk", "cpu"):
        with pytest.raises(bigload.LoadError, match="does not compute on cpu"):
            bigload.load_checkpoint_and_dispatch(model, tmp_path, {"": device})
    assert model[0].weight.is_meta


@pytest.mark.parametrize("strict", [True, False])
def test_a_quantised_checkpoint_is_not_loaded_without_its_scales(tmp_path, strict):
    weights = {"0.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "0.weight_scale": torch.full((1,), 3.0)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    with bigload.init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with pytest.raises(bigload.StateDictMismatchError) as refused:
        bigload.load_checkpoint_and_dispatch(model, tmp_path, {"": "disk"}, strict=strict)
    assert "prepare_quantised" in refused.value.hint


class Rearranged(nn.Linear):
    """A layer that doubles its weight at its first forward, and computes with what it has then."""

    is_rearranged = False

    def forward(self, x):
        if not self.is_rearranged:
            self.weight = nn.Parameter(self.weight * 2)
            self.is_rearranged = True
        return super().forward(x)


def _make_a_buffer(module):
    module.register_buffer("made", torch.ones(3))


def test_a_passing_forward_leaves_the_layer_as_it_was():
    layer, x = Rearranged(3, 3), torch.ones(3)
    weight = layer.weight
    expected = nn.functional.linear(x, weight * 2, layer.bias)
    layer.forward = PassingForward(layer, _make_a_buffer)
    for _ in range(2):
        assert torch.equal(layer(x), expected)
        assert layer.weight is weight
        assert not layer.is_rearranged
        assert not list(layer.buffers())
    model = bigload.cpu_offload(nn.Sequential(layer), "cpu")
    for each in (model, copy.deepcopy(model)):
        assert torch.equal(each(x), expected)
        assert each[0].weight.is_meta


def test_passing_forwards_of_several_threads_take_turns():
    layer, x = Rearranged(3, 3), torch.ones(3)
    expected = nn.functional.linear(x, layer.weight * 2, layer.bias)
    layer.forward = PassingForward(layer, lambda _: None)
    wrong = []
    threads = [
        threading.Thread(target=lambda: wrong.extend(1 for _ in range(50) if not torch.equal(layer(x), expected)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
