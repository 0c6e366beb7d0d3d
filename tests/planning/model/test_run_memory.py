from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.planning.choices import Attention
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.run_memory import RunMemory, memory_model
from bigload.planning.workload import Workload
from builders import checkpoint_of, llama_config, llama_tensors

# Of `llama_tensors`: hidden 8, feed-forward 16, vocabulary 32, 16-bit floats.
HUNDRED = Workload(context=100)


def blocks_of(tensors):
    return [node for node in build_tree(tensors).walk() if node.name.rpartition(".")[2].isdecimal()]


def memory_of(forms, config, workload=HUNDRED):
    return memory_model_of(forms, config).at(workload)


def test_without_context_nothing_is_needed():
    nothing = RunMemory(cache_bytes={}, logits_bytes=0, activation_bytes=0, unknown=())
    assert memory_of(llama_tensors(), llama_config(), Workload()) == nothing
    assert memory_of(llama_tensors(), None, Workload(batch=8)) == nothing


def test_the_parts_of_a_small_llama():
    assert memory_of(llama_tensors(blocks=2), llama_config(), Workload(context=100, batch=3)) == RunMemory(
        cache_bytes={f"model.layers.{index}": 3 * 100 * (8 + 8) * 2 for index in range(2)},
        logits_bytes=3 * 32 * 4,
        activation_bytes=3 * 100 * ((5 * 8 + 3 * 8 + 100) * 2 + 100),  # a mask of numbers, made of one of booleans
        unknown=(),
    )


def test_logits_are_of_the_last_token_and_as_many_as_the_head_has_rows():
    forms = llama_tensors() | {"lm_head.weight": ("BF16", [30, 8])}
    for context in (1, 100):
        assert memory_of(forms, llama_config(), Workload(context=context)).logits_bytes == 30 * 4


def test_a_tied_head_has_the_rows_of_the_embedding():
    assert memory_of(llama_tensors(tied=True), llama_config(tied=True)).logits_bytes == 32 * 4


def test_a_packed_head_is_as_wide_as_the_config_says():
    forms = {
        name: form if "embed" not in name and "lm_head" not in name else ("U8", [128, 1])
        for name, form in llama_tensors().items()
    }
    assert memory_of(forms, llama_config() | {"vocab_size": 64}).logits_bytes == 64 * 4
    assert "logits are not counted" in memory_of(forms, llama_config()).unknown[-1]


def test_a_masked_language_model_has_logits_of_every_token():
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 32}
    forms = {name.replace("model.layers", "bert.encoder.layer"): form for name, form in llama_tensors().items()}
    assert memory_of(forms, config).logits_bytes == 100 * 32 * 4


def test_a_model_that_makes_no_words_has_no_logits():
    forms = {"encoder.layer.0.attention.key.weight": ("F32", [8, 8]), "encoder.layer.0.norm.weight": ("F32", [8])}
    found = memory_of(forms, {"model_type": "vit", "architectures": ["ViTModel"], "vocab_size": 32})
    assert (found.logits_bytes, found.unknown) == (0, ())


def test_activations_are_those_of_the_block_that_needs_most():
    wide = {"model.layers.1.mlp.up_proj.weight": ("BF16", [64, 8])}
    assert memory_of(llama_tensors(), llama_config()).activation_bytes == 100 * (5 * 8 + 6 * 8) * 2
    assert memory_of(llama_tensors() | wide, llama_config()).activation_bytes == 100 * (5 * 8 + 2 * 64) * 2


def memory_model_of(forms, config):
    tensors = checkpoint_of(forms).tensors
    return memory_model(blocks_of(tensors), tensors, ModelConfig(config))


@pytest.mark.parametrize(
    ("model_type", "attention", "default"),
    [
        ("llama", None, "sdpa"),
        ("gpt_oss", None, "eager"),
        ("llama", Attention.EAGER, "eager"),
        ("gpt_oss", Attention.SDPA, "sdpa"),
    ],
)
def test_attention_is_the_one_asked_for_or_the_one_that_transformers_chooses(model_type, attention, default):
    config = llama_config() | {"model_type": model_type, "num_attention_heads": 4}
    long = Workload(context=2000, attention=attention)
    scores = 4 * 2000 * 2000 * 2
    assert (memory_of(llama_tensors(), config, long).activation_bytes > scores) == (default == "eager")


def codes_of(config, workload, forms=None):
    return dict(memory_model_of(forms or llama_tensors(), llama_config() | config).assumptions(workload))


def test_eager_attention_that_nobody_asked_for_is_said():
    assert "counted as eager" in codes_of({"model_type": "gpt_oss"}, HUNDRED)["attention"]
    assert "no sdpa" in codes_of({"model_type": "gpt_oss"}, replace(HUNDRED, attention=Attention.SDPA))["attention"]
    assert codes_of({"model_type": "gpt_oss"}, replace(HUNDRED, attention=Attention.EAGER)) == {}
    assert codes_of({}, HUNDRED) == codes_of({"model_type": "gpt_oss"}, Workload()) == {}


def test_the_cache_and_the_chunks_that_are_counted_are_said():
    window = {"model_type": "mistral", "sliding_window": 50}
    assert codes_of(window, HUNDRED)["cache"].endswith(
        "layers with a window hold the last chunk of a prompt until the next token"
    )
    assert codes_of({}, Workload(context=10_000))["cache"].endswith("fed in chunks of 2048 tokens (prefill_chunk_size)")
    assert "cache" not in codes_of(window, Workload(context=40))


def test_a_scan_without_kernels_is_said():
    mixer = {"conv1d": [16, 1, 4], "in_proj": [32, 8], "out_proj": [8, 16]}
    forms = {
        f"layers.{index}.mixer.{name}.weight": ("BF16", shape) for index in range(2) for name, shape in mixer.items()
    }
    forms |= {f"layers.{index}.mixer.A_log": ("F32", [16, 4]) for index in range(2)}
    assert "without the kernels" in codes_of({"model_type": "mamba"}, HUNDRED, forms)["scan"]


def test_an_encoder_of_text_is_counted_and_one_of_images_is_not():
    forms = {name.replace("model.layers", "bert.encoder.layer"): form for name, form in llama_tensors().items()}
    bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    assert memory_of(forms, bert).activation_bytes == 100 * (5 * 8 + 6 * 8) * 2
    vit = {
        name.replace("embed_tokens", "patches").replace("lm_head", "classifier"): form for name, form in forms.items()
    }
    assert memory_of(vit, {"model_type": "vit", "architectures": ["ViTModel"]}).activation_bytes == 0


def test_widths_that_nothing_tells_are_said_to_be_unknown():
    found = memory_of(
        {"layers.0.a.b.weight": ("BF16", [8, 8]), "layers.1.a.b.weight": ("BF16", [8, 8])}, {"vocab_size": 8}
    )
    assert found.activation_bytes == 0
    assert "activations are not counted" in found.unknown[-1]


@pytest.mark.parametrize("config", [None, {}])
def test_without_a_config_shapes_still_tell_and_the_rest_is_said(config):
    found = memory_of(llama_tensors(blocks=1), config)
    assert found.cache_bytes == {"model.layers.0": 100 * 16 * 2}
    assert found.unknown == (
        "no config.json tells how far attention reaches; it is taken to reach over the whole context",
    )


def test_no_tensors_need_nothing():
    assert memory_of({}, llama_config()) == RunMemory(cache_bytes={}, logits_bytes=0, activation_bytes=0, unknown=())


KEYS = [
    "architectures", "attention_chunk_size", "attn_config", "dtype", "head_dim", "hidden_size", "intermediate_size",
    "is_decoder", "kv_lora_rank", "layer_types", "max_window_layers", "model_type", "moe_intermediate_size",
    "multi_query", "new_decoder_architecture", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "num_kv_shared_layers", "num_mel_bins", "max_source_positions", "n_groups",
    "qk_rope_head_dim", "sliding_window", "sliding_window_pattern", "text_config", "torch_dtype", "use_sliding_window",
    "vision_config", "vocab_size", "max_num_tiles", "image_size", "patch_size", "linear_num_key_heads", "state_size",
]  # fmt: skip
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 10**30])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["sliding_attention", "gemma2", "BertForMaskedLM", "bfloat16"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=12,
)
SHAPES = st.lists(st.integers(0, 5), max_size=4)
PARTS = [
    "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.o_proj", "attn.qkv_proj", "attn.out_proj",
    "self_attn.kv_a_proj_with_mqa", "cross_attn.k_proj", "mixer.conv1d", "mixer.A_log", "mixer.out_proj", "mlp.up_proj",
    "linear_attn.in_proj_ba", "ln_attn", "ln_mlp", "self_attn.indexer.wk",
]  # fmt: skip
TAILS = ["", ".weight", ".bias", ".qweight", ".scales", ".weight.absmax"]


@given(
    config=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=12),
    shapes=st.dictionaries(st.tuples(st.integers(0, 3), st.sampled_from(PARTS), st.sampled_from(TAILS)), SHAPES),
    dtype=st.sampled_from(["BF16", "U8", "I32", "F8_E4M3"]),
)
def test_no_config_and_no_shapes_break_the_counting(config, shapes, dtype):
    forms = {f"model.layers.{index}.{part}{tail}": (dtype, shape) for (index, part, tail), shape in shapes.items()}
    found = memory_of(forms, config, Workload(context=1000, batch=2))
    assert all(isinstance(num_bytes, int) and num_bytes > 0 for num_bytes in found.cache_bytes.values())
    assert found.logits_bytes >= 0
    assert found.activation_bytes >= 0
