"""Each architecture of GGUF: written, it answers in llama.cpp as in transformers; read again, it is the same model."""

import re
from json import dumps, loads
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
import llama_cpp_server
from bigload.layouts.kinds import gguf_file
from gguf_models import MARKS, gguf, small_model, transformers

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

pytestmark = MARKS

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LAYERS = {"num_hidden_layers": 4}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
LATENT = {
    **ROUTED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
GROUPS = {"n_group": 2, "topk_group": 1}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + each / 8 for each in range(16)],
    "long_factor": [2.0 + each for each in range(16)],
}
T5 = {"d_model": 128, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
GEMMA4 = {
    **LAYERS,
    "head_dim": 32,
    "global_head_dim": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
K_IS_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": False}
GPT2 = {"intermediate_size": 512, "n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 128}
CASES = {
    "llama": {"attention_bias": True},
    "llama 3.1": {"head_dim": 64, "rope_parameters": LLAMA3},
    "llama 3.1 of 64 tokens": {"head_dim": 64, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "qwen3_moe": {**EXPERTS, "head_dim": 64, "norm_topk_prob": True},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "gemma3_text": {"head_dim": 64, "query_pre_attn_scalar": 64},
    "gemma4_text": GEMMA4,
    "gemma4_text of one size": {**GEMMA4, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, **K_IS_V},
    "gemma4_text with experts": {
        **GEMMA4,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "phi3": {},
    "phi3 of few tokens": {
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 256,
        "max_position_embeddings": 512,
    },
    "phi3 of many tokens": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 3},
    "glm4": {"head_dim": 32, "attention_bias": True},
    "glm": {"head_dim": 32, "attention_bias": True},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "olmo3": {"sliding_window": 8, **LAYERS},
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "cohere": {"logit_scale": 0.5},
    "cohere of 64 layers": {"use_qk_norm": True, "num_hidden_layers": 64},
    "cohere2": {"head_dim": 32, "sliding_window": 8, **LAYERS},
    "starcoder2": {},
    "stablelm": {"use_qkv_bias": True},
    "phi": {},
    "nemotron": {},
    "arcee": {},
    "seed_oss": {"head_dim": 32, "attention_bias": False},
    "jais2": {},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_end_index": 2,
    },
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_dense with alpha": {
        "head_dim": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0},
    },
    "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": [2, 2]},
    "smollm3": LAYERS,
    "exaone4": {"head_dim": 32, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "deepseek_v3": {**LATENT, **GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "deepseek_v2": LATENT,
    "glm4_moe_lite": {**LATENT, "norm_topk_prob": True},
    "glm4_moe": {**ROUTED, "head_dim": 32, "use_qk_norm": True},
    "dots1": {**ROUTED, "num_key_value_heads": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16},
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "head_dim": 32,
        "intermediate_size_mlp": 192,
        "interleave_moe_layer_step": 2,
        **LAYERS,
    },
    "t5": T5,
    "t5 with a gate": {**T5, "feed_forward_proj": "gated-gelu"},
    "mt5": T5,
    "umt5": T5,
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2},
    "granitemoeshared": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.2,
        "shared_intermediate_size": 64,
    },
    "qwen3 with YaRN": {"head_dim": 64, "rope_parameters": YARN},
    "deepseek_v3 with YaRN": {**LATENT, **GROUPS, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "gpt2": GPT2,
    "gpt_bigcode": {**GPT2, "n_inner": 512},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {},
    "gpt_neox": {"num_key_value_heads": 4},
    "mamba": {"state_size": 16, "intermediate_size": 256},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 8},
    "falcon_mamba": {"state_size": 16, "intermediate_size": 256},
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "use_expert_bias": True,
        "norm_topk_prob": True,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32, "intermediate_size": 192},
}
QUICK = {"llama", "qwen3_moe", "phi3", "deepseek_v3", "gpt_oss"}
"""Cases of the default tests, one for each way of storing heads and experts; the others are slow."""

READ_BY_TRANSFORMERS = {
    *("llama", "mistral", "qwen2", "gemma2", "gemma3_text", "phi3", "starcoder2", "stablelm", "nemotron"),
    *("bloom", "falcon", "mamba", "lfm2", "t5 with a gate", "umt5", "minimax_m2"),
}
"""transformers 5.24 has tables of more, but builds another model of the file (head sizes, experts), or none."""


def saved(case, folder):
    """Save a model of random weights with a tokenizer, and return that."""
    small_model(case.split()[0], CASES[case]).save_pretrained(folder)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    made.train_from_iterator(["The quick brown fox jumps over the lazy dog. "] * 9, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return made


@pytest.fixture(
    scope="module", params=[pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES]
)
def case(request, tmp_path_factory):
    """A model of the family in a folder, and the GGUF file written of it."""
    folder = tmp_path_factory.mktemp(request.param)
    made = saved(request.param, folder / "in")
    bigload.reshard(folder / "in", folder / "out", layout="gguf", dtype="fp32")
    (folder / "alone").mkdir()  # without the config.json that was copied, which readers prefer
    (folder / "out" / "model.gguf").rename(folder / "alone" / "model.gguf")
    return SimpleNamespace(
        family=request.param,
        model=loaded(folder / "in"),
        folder=folder / "in",
        file=folder / "alone" / "model.gguf",
        tokenizer=made,
    )


def loaded(folder):
    """Return the model of a folder, of whichever class its config names."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()


def logits(model, tokens):
    """Return the logits of `tokens`; for an encoder-decoder, of both sides."""
    with torch.no_grad():
        decoder = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        return model(tokens, **decoder).logits


def test_llama_cpp_answers_as_transformers(case):
    if case.model.config.is_encoder_decoder:
        pytest.skip("the server of llama.cpp has no encoder")
    check_answer(case.file, case.model, case.tokenizer)


def check_answer(file, model, tokenizer):
    """Compare the greedy answer of llama.cpp with that of transformers."""
    text = "The quick brown fox"
    (found,), answer = llama_cpp_server.ask(file, [text], num_tokens=16)
    assert found == tokenizer.encode(text).ids
    whole = model.generate(torch.tensor([found]), max_new_tokens=16, do_sample=False, eos_token_id=None)[0].tolist()
    answered = whole[len(found) :]
    assert answer == tokenizer.decode(answered[: answered.index(2) + 1] if 2 in answered else answered)  # its end


def test_names_are_those_of_the_package(case):
    reader = gguf.GGUFReader(case.file)
    architecture = reader.fields["general.architecture"].contents()
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[number]}
    for tensor in reader.tensors:
        block = next((part for part in tensor.name.split(".") if part.isdecimal()), "")
        name = re.sub(r"\.(weight|bias|scale)$", "", tensor.name)
        assert name in {each.format(bid=block) for each in known}


def test_what_is_read_again_is_the_same_model(case, tmp_path):
    bigload.reshard(case.file, tmp_path / "back", dtype="fp32")
    found, said = type(case.model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(said.values())
    expected = case.model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    for name, tensor in found.state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=3e-7), name  # norms less one, one added
    tokens = torch.arange(3, 60).unsqueeze(0)
    assert torch.allclose(logits(found.eval(), tokens), logits(case.model, tokens), rtol=1e-4, atol=1e-4)


def test_a_plan_is_that_of_the_model_as_safetensors(case):
    found, expected = (
        bigload.plan(source, {"cuda:0": "2MiB", "cpu": "1GiB"}, context=64, overhead=0, dtype="fp32")
        for source in (case.file, case.folder)
    )
    assert found.device_map == expected.device_map
    assert found.devices == expected.devices


def test_transformers_reads_the_same_tensors(case):
    if case.family not in READ_BY_TRANSFORMERS:
        pytest.skip("transformers makes another model of such a file, or none")
    found = type(case.model).from_pretrained(case.file.parent, gguf_file=case.file.name)
    expected = case.model.state_dict()
    for name, tensor in found.state_dict().items():
        assert torch.allclose(tensor, expected[name], rtol=0, atol=3e-7), name


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path):
    tokenizer = saved("gpt_oss", tmp_path / "in")
    tensors, config = load_file(tmp_path / "in/model.safetensors"), loads((tmp_path / "in/config.json").read_text())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "in/config.json").write_text(dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))

    bigload.reshard(tmp_path / "in", tmp_path / "plain", dtype="fp32", transforms=[bigload.Dequantize()])
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")

    file = tmp_path / "alone.gguf"
    (tmp_path / "out/model.gguf").rename(file)
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(file).tensors if "_exps.weight" in each.name}
    assert set(types.values()) == {"MXFP4"}
    assert len(types) == 6
    bigload.reshard(file, tmp_path / "back", dtype="fp32")
    found, expected = (load_file(tmp_path / each / "model.safetensors") for each in ("back", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in found.items())
    check_answer(file, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval(), tokenizer)


HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "options", "expected"),
    [
        *((each, {"head_dim": 64}, "as wide together") for each in ("olmo2", "starcoder2", "stablelm")),
        *((each, HALF, "rotated whole") for each in ("olmo2", "starcoder2")),
        ("olmoe", {**CASES["olmoe"], "num_key_value_heads": 2}, "as many keys as queries"),
        ("mamba", {**CASES["mamba"], "intermediate_size": 128}, "twice the hidden one"),
    ],
)
def test_sizes_that_are_refused_are_those_that_llama_cpp_refuses(tmp_path, monkeypatch, model_type, options, expected):
    monkeypatch.setitem(CASES, model_type, options)
    saved(model_type, tmp_path / "in")
    with pytest.raises(bigload.errors.OptionError, match=expected):
        bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    monkeypatch.setattr(gguf_file, "check_sizes", lambda *_: None)
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    (tmp_path / "out/model.gguf").rename(tmp_path / "alone.gguf")
    assert llama_cpp_server.is_refused(tmp_path / "alone.gguf")


def with_prediction(folder, model_type):
    """Save a model with one layer more than it has: that of multi-token prediction. Return its tokenizer."""
    tokenizer = saved(model_type, folder)
    tensors = load_file(folder / "model.safetensors")
    copied = {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in tensors if "layers.1." in name}
    own = {"enorm": (128,), "hnorm": (128,), "eh_proj": (128, 256), "shared_head.norm": (128,)}
    own |= {"embed_tokens": (320, 128), "shared_head.head": (320, 128)}
    copied |= {f"model.layers.2.{name}.weight": torch.rand(shape) for name, shape in own.items()}
    save_file({**tensors, **copied}, folder / "model.safetensors", metadata={"format": "pt"})
    config = loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(dumps({**config, "num_nextn_predict_layers": 1}))
    return tokenizer, copied


@pytest.mark.parametrize(("model_type", "is_written"), [("glm4_moe", True), ("deepseek_v3", False)])
def test_layers_of_multi_token_prediction_are_those_that_llama_cpp_expects(tmp_path, model_type, is_written):
    tokenizer, extra = with_prediction(tmp_path / "in", model_type)
    report = bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf", dtype="fp32")
    assert any("1 layer of multi-token prediction" in note for note in report.output.notes) is not is_written
    file = tmp_path / "alone.gguf"
    (tmp_path / "out/model.gguf").rename(file)
    architecture, names = model_type.replace("_", ""), {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    if is_written:
        fields = gguf.GGUFReader(file).fields
        assert fields[f"{architecture}.block_count"].contents() == 3
        assert fields[f"{architecture}.nextn_predict_layers"].contents() == 1
        assert "blk.2.nextn.eh_proj.weight" in names
    else:
        assert not any(name.startswith("blk.2.") for name in names)
    bigload.reshard(file, tmp_path / "back", dtype="fp32")
    found, expected = (load_file(tmp_path / each / "model.safetensors") for each in ("back", "in"))
    assert found.keys() == expected.keys() - (set() if is_written else extra.keys())
    assert all(torch.allclose(tensor, expected[name], rtol=0, atol=3e-7) for name, tensor in found.items())
    assert loads((tmp_path / "back/config.json").read_text())["num_hidden_layers"] == 2
    check_answer(file, loaded(tmp_path / "in"), tokenizer)


def test_an_older_file_of_deepseek_has_keys_and_values_of_heads_in_one_tensor(tmp_path):
    tokenizer = saved("deepseek_v3", tmp_path / "in")
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf", dtype="fp32")
    reader, weights = gguf.GGUFReader(tmp_path / "out/model.gguf"), load_file(tmp_path / "in/model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "old.gguf", "deepseek2")
    changed = {
        "head_count_kv": 4,
        "key_length": 48,
        "value_length": 48,
        "key_length_mla": None,
        "value_length_mla": None,
    }
    for key, field in reader.fields.items():
        value = changed.get(key.removeprefix("deepseek2.attention."), field.contents())
        if value is not None and not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if "attn_k_b" not in tensor.name and "attn_v_b" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
    for number in range(2):
        whole = weights[f"model.layers.{number}.self_attn.kv_b_proj.weight"]
        writer.add_tensor(f"blk.{number}.attn_kv_b.weight", whole.numpy())
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    bigload.reshard(tmp_path / "old.gguf", tmp_path / "back", dtype="fp32")
    found = load_file(tmp_path / "back/model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
    tokens = torch.arange(3, 60).unsqueeze(0)
    back, model = loaded(tmp_path / "back"), loaded(tmp_path / "in")
    assert torch.allclose(logits(back, tokens), logits(model, tokens), rtol=1e-4, atol=1e-4)
    check_answer(tmp_path / "old.gguf", model, tokenizer)
