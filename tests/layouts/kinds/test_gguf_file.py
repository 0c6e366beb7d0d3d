"""The layout `gguf`: a file that is read back as the same tensors and sizes, or a refusal before a byte is written."""

import json
import struct

import pytest

import bigload
from bigload.checkpoint.formats.gguf.families import FAMILIES, PredictionLayers
from bigload.errors import OptionError
from gguf_files import gguf_bytes, text, value

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file
load_file = pytest.importorskip("safetensors.torch").load_file

HIDDEN, FFN, ROWS, HEADS, KV_HEADS = 64, 96, 40, 4, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.5,
    "rope_theta": 10000.0,
    "eos_token_id": [2, 3],
    "vocab_size": ROWS,
    "tie_word_embeddings": False,
}
SHAPES = {
    "model.embed_tokens.weight": (ROWS, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (ROWS, HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.q_proj.bias": (HIDDEN,),
}
MLP = {
    "model.layers.0.mlp.gate_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (FFN, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN),
}
PARTS = {"w1": (FFN, HIDDEN), "w2": (HIDDEN, FFN), "w3": (FFN, HIDDEN)}
EXPERTS = {
    f"model.layers.0.block_sparse_moe.experts.{number}.{part}.weight": shape
    for number in range(11)
    for part, shape in PARTS.items()
} | {"model.layers.0.block_sparse_moe.gate.weight": (11, HIDDEN)}


def written(folder, shapes=None, **config):
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in (shapes or {**SHAPES, **MLP}).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return tensors


@pytest.mark.parametrize(
    ("model_type", "shapes"), [("llama", {**SHAPES, **MLP}), ("mixtral", {**SHAPES, **EXPERTS}), ("mistral", None)]
)
def test_tensors_and_sizes_come_back(tmp_path, model_type, shapes):
    experts = {"num_local_experts": 11, "num_experts_per_tok": 2} if model_type == "mixtral" else {}
    tensors = written(tmp_path / "in", shapes, model_type=model_type, **experts)
    bigload.reshard(tmp_path / "in", tmp_path / "gguf", layout="gguf")
    found = bigload.open_checkpoint(tmp_path / "gguf" / "model.gguf")
    known = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type", "rope_theta")}
    assert {**found.config, "eos_token_id": [2, 3]}.items() >= {**known, **experts, "model_type": model_type}.items()
    bigload.reshard(tmp_path / "gguf" / "model.gguf", tmp_path / "back", dtype="fp32")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_the_tokenizer_of_the_folder_is_in_the_file(tmp_path):
    written(tmp_path / "in")
    vocab = {chr(97 + number): number for number in range(20)}
    tokenizer = {
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    }
    (tmp_path / "in" / "tokenizer.json").write_text(json.dumps(tokenizer))
    report = bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    assert report.output.notes == ("model.gguf has the tokenizer, of llama.cpp's kind gpt2 (pre gpt-2)",)
    (shard,) = bigload.open_checkpoint(tmp_path / "out" / "model.gguf").shards
    assert shard.metadata["tokenizer.ggml.model"] == "gpt2"
    assert shard.metadata["tokenizer.ggml.tokens"] == f"array of {ROWS}"
    (tmp_path / "in" / "tokenizer.json").unlink()
    report = bigload.reshard(tmp_path / "in", tmp_path / "none", layout="gguf")
    assert report.output.notes[0].startswith(
        "model.gguf has no tokenizer, which llama.cpp needs: the folder has neither"
    )


@pytest.mark.parametrize(
    ("dtype", "forms"), [(None, "Q4_K Q8_0 F32"), ("q8_0", "Q8_0 Q8_0 F32"), ("bf16", "BF16 BF16 F32")]
)
def test_a_file_of_any_architecture_keeps_its_keys_and_values_in_another_type(tmp_path, dtype, forms):
    shapes = {"token_embd.weight": (12, (10, 256)), "blk.0.odd.weight": (8, (4, 256)), "blk.0.odd.bias": (0, (8,))}
    keys = {"general.architecture": "odd", "odd.scale": 0.5, "tokenizer.ggml.tokens": ["a", "b"], "a": [1, 2]}
    parts = ({"token_embd.weight": shapes.pop("token_embd.weight")}, shapes)
    for number, tensors in enumerate(parts):
        split = {"split.no": number, "split.count": 2, "split.tensors.count": 3}
        path = tmp_path / f"m-0000{number + 1}-of-00002.gguf"
        raw = bytearray(gguf_bytes(tensors, split | (keys if number == 0 else {})))
        data = len(raw) - (1440 if number == 0 else 1088 + 32)
        raw[data:] = bytes(byte % 50 for byte in range(len(raw) - data))
        path.write_bytes(raw)
    first = tmp_path / "m-00001-of-00002.gguf"
    bigload.reshard(first, tmp_path / "out", layout="gguf", dtype=dtype)
    found = bigload.open_checkpoint(tmp_path / "out" / "model.gguf")
    assert [tensor.dtype.name for tensor in found.tensors.values()] == forms.split()
    raw = (tmp_path / "out" / "model.gguf").read_bytes()
    assert all(text(key) + value(given) in raw for key, given in keys.items())
    assert not any(key.startswith("split.") for key in found.shards[0].metadata)
    for source, out in ((first, "direct"), (tmp_path / "out" / "model.gguf", "again")):
        bigload.reshard(source, tmp_path / out, dtype="fp32")
    direct, again = (load_file(tmp_path / each / "model.safetensors") for each in ("direct", "again"))
    assert direct.keys() == again.keys()
    for name, tensor in direct.items():
        tolerance = {None: 0, "q8_0": 1 / 254, "bf16": 1 / 256}[dtype] * tensor.abs().max().item()
        assert torch.allclose(again[name], tensor, rtol=0, atol=tolerance), name
    with pytest.raises(OptionError, match="none from GGUF to GGUF"):
        bigload.reshard(first, tmp_path / "x", layout="gguf", transforms=[bigload.Drop("odd")])


def test_blocks_of_q8_0_are_near_and_rows_that_are_no_blocks_are_float16(tmp_path):
    shapes = {**SHAPES, **MLP, "model.layers.0.mlp.down_proj.weight": (HIDDEN, FFN + 8)}
    tensors = written(tmp_path / "in", shapes)
    bigload.reshard(tmp_path / "in", tmp_path / "gguf", layout="gguf", dtype="q8_0")
    found = bigload.open_checkpoint(tmp_path / "gguf" / "model.gguf").tensors
    assert found["model.layers.0.mlp.up_proj.weight"].dtype.name == "Q8_0"
    assert found["model.layers.0.mlp.down_proj.weight"].dtype.name == "F16"
    assert found["model.norm.weight"].dtype.name == "F32"
    bigload.reshard(tmp_path / "gguf" / "model.gguf", tmp_path / "back", dtype="fp32")
    back = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in tensors.items():
        rows = tensor.abs().amax(-1, keepdim=True)
        assert bool(((back[name] - tensor).abs() <= rows / 127).all()), name


def test_frequencies_of_llama_3_1_are_divided_by_their_wavelength(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    written(tmp_path / "in", rope_scaling=scaling)
    bigload.reshard(tmp_path / "in", tmp_path / "gguf", layout="gguf", dtype="bf16")
    tensor = bigload.open_checkpoint(tmp_path / "gguf" / "model.gguf").tensors["rope_freqs.weight"]
    raw = (tmp_path / "gguf" / "model.gguf").read_bytes()[tensor.span.start : tensor.span.stop]
    # a head of 16: wavelengths 6.3, 19.9, 62.8, 199 ...; all below 16 stay, all beyond 64 are divided
    first, second, third, *others = struct.unpack("<8f", raw)
    assert first == 1
    assert 1 < second < third < 8
    assert others == [8.0] * 5


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "words"}, "'words' has none"),
        ({"quantization_config": {"quant_method": "gptq"}}, "not quantised"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "this one has 'longrope'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate is True, as llama.cpp"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor above 0 .*found None"),
        (
            {"model_type": "qwen3_moe", "norm_topk_prob": False},
            "norm_topk_prob is True, as llama.cpp computes; it is False",
        ),
        (
            {"model_type": "gemma2", "query_pre_attn_scalar": 9},
            "query_pre_attn_scalar is 16, as llama.cpp computes; it is 9",
        ),
        ({"hidden_size": "many"}, "hidden_size and num_attention_heads"),
    ],
)
def test_what_has_no_form_in_gguf_is_refused(tmp_path, changes, expected):
    written(tmp_path / "in", **changes)
    with pytest.raises(OptionError, match=expected):
        bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("whole", ["model.language_model", "language_model.model", "model.text_model"])
def test_of_a_multimodal_model_the_text_model_is_written(tmp_path, whole):
    tensors = written(tmp_path / "text")
    renamed = {name.replace("model.", f"{whole}.", 1): tensor for name, tensor in tensors.items()}
    (tmp_path / "several/text").mkdir(parents=True)
    save_file({**renamed, "vision_tower.a.weight": torch.ones(2, 2)}, tmp_path / "several/text/model.safetensors")
    inner = {key: value for key, value in CONFIG.items() if key != "eos_token_id"}
    config = {"model_type": "llava", "text_config": inner, "eos_token_id": CONFIG["eos_token_id"]}
    (tmp_path / "several/text/config.json").write_text(json.dumps(config))
    bigload.reshard(tmp_path / "text", tmp_path / "out", layout="gguf")
    report = bigload.reshard(tmp_path / "several/text", tmp_path / "of-several", layout="gguf")
    assert (tmp_path / "out/model.gguf").read_bytes() == (tmp_path / "of-several/model.gguf").read_bytes()
    assert any("only the text model is written, without vision_tower," in note for note in report.output.notes)


def test_a_number_for_each_layer_is_one_if_all_are_alike(tmp_path):
    written(
        tmp_path / "in", {**SHAPES, **EXPERTS}, model_type="mixtral", num_local_experts=11, num_experts_per_tok=[2, 2]
    )
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    (tmp_path / "out/config.json").unlink()
    assert bigload.open_checkpoint(tmp_path / "out/model.gguf").config["num_experts_per_tok"] == 2


def test_sizes_that_a_published_config_leaves_out_are_those_of_the_class(tmp_path):
    """config.json of Gemma 3 4B has no numbers of heads, and no base of the rotary embedding."""
    (tmp_path / "in").mkdir()
    stated = {key: CONFIG[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **stated}}
    (tmp_path / "in/config.json").write_text(json.dumps(config))
    save_file({"model.language_model.norm.weight": torch.ones(HIDDEN)}, tmp_path / "in/model.safetensors")
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    (tmp_path / "out/config.json").unlink()
    found = bigload.open_checkpoint(tmp_path / "out/model.gguf").config
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "rope_theta": 1e6}
    assert found.items() >= {**sizes, **stated, "rope_local_base_freq": 1e4}.items()


def test_an_output_that_is_called_gguf_has_the_layout_named(tmp_path):
    written(tmp_path / "in")
    with pytest.raises(OptionError, match="expected gguf for an output of that name") as caught:
        bigload.reshard(tmp_path / "in", tmp_path / "out.gguf", dtype="bf16")
    assert "--layout gguf" in caught.value.hint
    assert not (tmp_path / "out.gguf").exists()


def test_a_tensor_without_a_name_is_refused(tmp_path):
    written(tmp_path / "in", {**SHAPES, **MLP, "model.layers.0.self_attn.sinks": (HEADS,)})
    with pytest.raises(OptionError, match="sinks has none"):
        bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")


REFUSED = [each for each in FAMILIES.values() if each.prediction is PredictionLayers.REFUSED and each.block]


@pytest.mark.parametrize("family", REFUSED, ids=lambda each: each.model_type)
def test_a_layer_of_multi_token_prediction_is_refused_where_llama_cpp_has_none(tmp_path, family):
    name = f"{family.layers}.1.eh_proj.weight"
    config = {**family.builtin, family.keys["block_count"]: 1, "model_type": family.model_type}
    written(tmp_path / "in", {f"{family.layers}.0.a.weight": (2, 2), name: (2, 4)}, **config)
    with pytest.raises(OptionError, match=f"of 1 layer, as .* there is {name}") as caught:
        bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    assert f"--drop '{family.layers}.1.*'" in caught.value.hint


def test_without_its_layer_of_multi_token_prediction_a_model_is_written(tmp_path):
    for folder, extra in (("in", {"model.layers.1.eh_proj.weight": (2, 4)}), ("without", {})):
        written(tmp_path / folder, {**SHAPES, **MLP, **extra})
    bigload.reshard(tmp_path / "in", tmp_path / "dropped", layout="gguf", transforms=[bigload.Drop("model.layers.1.*")])
    bigload.reshard(tmp_path / "without", tmp_path / "out", layout="gguf")
    found, expected = (bigload.open_checkpoint(tmp_path / each / "model.gguf").tensors for each in ("dropped", "out"))
    assert found.keys() == expected.keys()


def test_tensors_begin_where_ggml_wants_them(tmp_path):
    """llama.cpp ends where one is not aligned to 32 bytes, which 3 elements would cause for the next."""
    written(tmp_path / "in", {**SHAPES, **MLP, "model.layers.0.self_attn.q_norm.weight": (3,)})
    bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")
    found = bigload.open_checkpoint(tmp_path / "out" / "model.gguf").tensors.values()
    assert {tensor.span.start % 32 for tensor in found} == {0}


def test_a_missing_expert_is_refused(tmp_path):
    shapes = {name: shape for name, shape in {**SHAPES, **EXPERTS}.items() if ".experts.4.w2" not in name}
    written(tmp_path / "in", shapes, model_type="mixtral", num_local_experts=11, num_experts_per_tok=2)
    with pytest.raises(OptionError, match="some are missing"):
        bigload.reshard(tmp_path / "in", tmp_path / "out", layout="gguf")


def test_blocks_are_for_gguf_only(tmp_path):
    written(tmp_path / "in")
    with pytest.raises(OptionError, match="the layout shards has no blocks of ggml"):
        bigload.reshard(tmp_path / "in", tmp_path / "out", dtype="q8_0")
