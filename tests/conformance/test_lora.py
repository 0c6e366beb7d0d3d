"""Adapters that PEFT saved are merged to the bit as PEFT merges them in float32, then cast."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload import MergeLora

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 300,
}


def _model(kind):
    torch.manual_seed(0)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(intermediate_size=200, **SIZES))
    if kind == "mixtral":
        config = transformers.MixtralConfig(intermediate_size=96, num_local_experts=4, **SIZES)
        return transformers.MixtralForCausalLM(config)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=300, **sizes))


def _saved(model, base, folder, **options):
    torch.manual_seed(1)
    plain = type(model).from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(plain, peft.LoraConfig(**options))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data = torch.randn_like(parameter) * 0.1 + 0.5 * ("magnitude" in name)
    wrapped.save_pretrained(folder)
    return folder


def _merged_by_peft(model, base, *adapters):
    plain = type(model).from_pretrained(base, dtype=torch.float32)
    wrapped = peft.PeftModel.from_pretrained(plain, adapters[0], adapter_name="0")
    for number, adapter in enumerate(adapters[1:], start=1):
        wrapped.load_adapter(adapter, adapter_name=str(number))
    wrapped.base_model.set_adapter([str(number) for number in range(len(adapters))])
    return wrapped.merge_and_unload().state_dict()


def _check(found, expected):
    for name, tensor in found.items():
        known = name if name in expected else f"transformer.{name}"
        assert torch.equal(tensor, expected[known].to(tensor.dtype)), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("mixtral", {"target_modules": ["v_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ],
)
def test_a_plan_counts_the_bytes_that_peft_loads(tmp_path, *, kind, options, base_dtype, dtype):
    """Whatever dtype the adapter is saved in."""
    base = tmp_path / "base"
    model = _model(kind).to(base_dtype)
    model.save_pretrained(base)
    adapter = _saved(model, base, tmp_path / "adapter", r=4, **options)
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    plain = type(model).from_pretrained(base, dtype=base_dtype)
    before = sum(parameter.nbytes for parameter in plain.parameters())
    wrapped = peft.PeftModel.from_pretrained(plain, adapter)
    added = sum(parameter.nbytes for parameter in wrapped.parameters()) - before
    plan = bigload.plan(base, {"cpu": "1GiB"}, lora=[adapter])
    assert sum(use.overhead_bytes for use in plan.devices) == added > 0


@pytest.mark.parametrize("dtype", [None, "fp32"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"]}),
        (
            "llama",
            {
                "target_modules": "all-linear",
                "use_rslora": True,
                "rank_pattern": {"q_proj": 4},
                "alpha_pattern": {"layers.1.self_attn.q_proj": 3},
            },
        ),
        ("llama", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True, "modules_to_save": ["lm_head"]}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "lora_bias": True}),
        ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True}),
        ("gpt2", {"target_modules": ["wte", "c_proj"], "fan_in_fan_out": True}),
        (
            "mixtral",
            {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
        ),
    ],
)
def test_a_merge_is_that_of_peft(tmp_path, kind, options, dtype):
    model, base = _model(kind), tmp_path / "base"
    model.to(torch.bfloat16).save_pretrained(base)
    adapter = _saved(model, base, tmp_path / "adapter", r=8, lora_alpha=12, **options)
    names = "transformers" if kind == "mixtral" else None
    bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(adapter)], dtype=dtype, names=names)
    _check(bigload.load(tmp_path / "out"), _merged_by_peft(model, base, adapter))


@pytest.mark.parametrize("use_dora", [False, True])
def test_several_adapters_are_merged_one_after_the_other(tmp_path, use_dora):
    model, base = _model("llama"), tmp_path / "base"
    model.to(torch.bfloat16).save_pretrained(base)
    options = {"target_modules": ["q_proj", "v_proj"], "use_dora": use_dora, "r": 4}
    adapters = [_saved(model, base, tmp_path / f"a{alpha}", lora_alpha=alpha, **options) for alpha in (3, 8)]
    bigload.reshard(base, tmp_path / "out", transforms=[MergeLora(adapter) for adapter in adapters])
    _check(bigload.load(tmp_path / "out"), _merged_by_peft(model, base, *adapters))
