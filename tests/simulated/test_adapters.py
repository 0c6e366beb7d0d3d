"""Adapters of PEFT on models that run on simulated accelerators, with parts in RAM and on disk."""

import pytest
import torch

import bigload
from tiny_models import make

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

IDS = torch.arange(3, 11).reshape(2, 4)


def lora():
    return peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def trained(model):
    return {name: parameter for name, parameter in model.named_parameters() if "lora_" in name}


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.cpu()


def dispatched(place, folder, **options):
    blocks = {"model.embed_tokens": 0, "model.norm": 1, "model.rotary_emb": 0, "lm_head": 1}
    layers = {f"model.layers.{number}": device for number, device in enumerate([place, place, 1, place])}
    model = make(transformers, "LlamaForCausalLM")
    return bigload.dispatch_model(model, {**blocks, **layers}, offload_dir=folder, **options).requires_grad_(False)


def assert_same(model, plain):
    torch.testing.assert_close(logits(model), logits(plain))
    found = {
        f"base_model.model.{name.removeprefix('base_model.model.')}": each for name, each in trained(model).items()
    }
    assert found.keys() == trained(plain).keys()
    for name, parameter in found.items():
        assert str(parameter.device) == ("sim:1" if ".layers.2." in name else "sim:0"), name
        torch.testing.assert_close(parameter.detach().cpu(), trained(plain)[name].detach())


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "by module"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_a_loaded_adapter_lives_where_its_module_runs(simulation, place, prefetch, tmp_path):
    plain = peft.get_peft_model(make(transformers, "LlamaForCausalLM"), lora())
    plain.save_pretrained(tmp_path / "adapter")
    model = dispatched(place, tmp_path / "offload", prefetch=prefetch)
    model.load_adapter(tmp_path / "adapter", is_trainable=True)
    assert_same(model, plain)


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "by module"])
def test_a_new_adapter_lives_where_its_module_runs(simulation, prefetch, tmp_path):
    plain, model = make(transformers, "LlamaForCausalLM"), dispatched("disk", tmp_path, prefetch=prefetch)
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, lora())
    torch.manual_seed(1)
    assert_same(peft.get_peft_model(model, lora()), plain)


def test_additions_on_another_device_are_brought_to_the_module(simulation, tmp_path):
    plain, model = make(transformers, "LlamaForCausalLM"), dispatched("cpu", tmp_path)
    torch.manual_seed(1)
    plain = peft.get_peft_model(plain, lora())
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora())
    before = trained(model)
    for name, module in model.named_modules():
        if "lora_" in name and ".layers.2." not in name:  # whose module is not offloaded
            module.to("cpu")
    assert {str(parameter.device) for parameter in trained(model).values()} == {"cpu", "sim:1"}
    assert_same(model, plain)
    assert all(parameter is before[name] for name, parameter in trained(model).items())
