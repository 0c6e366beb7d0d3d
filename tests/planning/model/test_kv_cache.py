"""Caches of blocks between tokens: at least one model for every rule, its bytes worked out by hand.

Unless a test says otherwise there are 100 tokens of context, one sequence and 16-bit floats: 2 bytes an element.
"""

from typing import NamedTuple

import pytest

from bigload.dtypes import DTYPES
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.kv_cache import block_caches, source_tokens
from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.units import UnitKind, cut_into_units
from bigload.planning.workload import PREFILL_CHUNK, Workload
from builders import checkpoint_of

HUNDRED = Workload(context=100)
ALL = 3 * PREFILL_CHUNK
LONG = Workload(context=ALL)


class Found(NamedTuple):
    cache_bytes: dict[str, int]
    unknown: tuple[str, ...]


def memory_of(tensors, config, workload=HUNDRED):
    root = build_tree(checkpoint_of(tensors).tensors)
    names = {part.name for unit in cut_into_units(root) for part in unit.parts if part.kind is UnitKind.BLOCK}
    asked = ModelConfig(config)
    caches, _, unknown = block_caches([node for node in root.walk() if node.name in names], asked)
    kept = {cache.block: cache.num_bytes(workload, source_tokens(asked)) for cache in caches}
    return Found({block: num_bytes for block, num_bytes in kept.items() if num_bytes}, unknown)


def cache_of(tensors, config, workload=HUNDRED):
    found = memory_of(tensors, config, workload)
    assert found.unknown == ()
    return list(found.cache_bytes.values())


def stack(*blocks, prefix="model.layers", dtype="BF16"):
    """Return the tensors of blocks, each given as the shapes of its weights; a name with a dot's tail is kept whole."""
    tails = (".weight", ".bias", "A_log", "qweight", "scales", "absmax")
    return {
        f"{prefix}.{index}.{name}" if name.endswith(tails) else f"{prefix}.{index}.{name}.weight": shape
        if isinstance(shape, tuple)
        else (dtype, shape)
        for index, block in enumerate(blocks)
        for name, shape in block.items()
    }


def attention(query=32, key=16, hidden=32, under="self_attn"):
    return {
        "norm": [hidden],
        f"{under}.q_proj": [query, hidden],
        f"{under}.k_proj": [key, hidden],
        f"{under}.v_proj": [key, hidden],
        f"{under}.o_proj": [hidden, query],
    }


PLAIN = {"model_type": "llama"}


def test_keys_and_values_are_as_wide_as_their_projections():
    # 100 tokens x (16 keys + 16 values) x 2 bytes
    assert cache_of(stack(attention(), attention()), PLAIN) == [6400, 6400]


@pytest.mark.parametrize(
    ("workload", "num_bytes"),
    [
        (Workload(context=0), []),
        (Workload(context=100, batch=3), [3 * 6400]),
        (Workload(context=100, kv_dtype=DTYPES["F8_E4M3"]), [3200]),
        (Workload(context=3, kv_dtype=DTYPES["F4"]), [48]),
        (Workload(context=100, load_dtype=DTYPES["F32"]), [12800]),
        (Workload(context=100, load_dtype=DTYPES["F32"], kv_dtype=DTYPES["BF16"]), [6400]),
    ],
)
def test_the_workload_scales_the_cache(workload, num_bytes):
    assert cache_of(stack(attention()), PLAIN, workload) == num_bytes


def test_the_cache_is_in_the_dtype_in_which_weights_are_stored():
    assert cache_of(stack(attention(), dtype="F32"), {**PLAIN, "torch_dtype": "bfloat16"}) == [12800]


def test_of_weights_in_eight_bits_the_config_gives_the_dtype():
    assert cache_of(stack(attention(), dtype="F8_E4M3"), {**PLAIN, "torch_dtype": "float16"}) == [6400]


def test_keys_and_values_may_have_unlike_widths():
    block = attention(key=24) | {"self_attn.v_proj": [16, 32]}
    assert cache_of(stack(block), PLAIN) == [100 * (24 + 16) * 2]


@pytest.mark.parametrize("name", ["qkv_proj", "query_key_value", "Wqkv", "wqkv", "W_pack", "c_attn"])
def test_of_a_fused_projection_the_queries_are_taken_off(name):
    # 64 rows, of which the output projection's 32 inputs are queries
    block = {"norm": [32], f"attn.{name}": [64, 32], "attn.o_proj": [32, 32]}
    assert cache_of(stack(block), PLAIN) == [6400]


def test_a_transposed_projection_is_known_by_its_bias():
    block = {
        "ln_1": [32],
        "attn.c_attn": [32, 96],
        "attn.c_attn.bias": [96],
        "attn.c_proj": [32, 32],
        "attn.c_proj.bias": [32],
    }
    assert cache_of(stack(block, prefix="transformer.h"), {"model_type": "gpt2"}) == [100 * 2 * 32 * 2]


def test_falcon_caches_one_key_head_or_keys_of_all_heads_by_its_architecture():
    old = {"input_layernorm": [32], "self_attention.query_key_value": [48, 32], "self_attention.dense": [32, 32]}
    new = {name: shape for name, shape in old.items() if name != "input_layernorm"} | {"ln_attn": [32], "ln_mlp": [32]}
    assert cache_of(stack(old, prefix="transformer.h"), {"model_type": "falcon"}) == [100 * 16 * 2]
    assert cache_of(stack(new, prefix="transformer.h"), {"model_type": "RefinedWeb"}) == [100 * (32 + 32) * 2]
    flagged = {"model_type": "falcon", "new_decoder_architecture": True}
    assert cache_of(stack(old, prefix="transformer.h"), flagged) == [100 * (32 + 32) * 2]


LATENT = {
    "norm": [32],
    "self_attn.q_proj": [64, 32],
    "self_attn.kv_a_proj_with_mqa": [20, 32],
    "self_attn.kv_b_proj": [128, 16],
    "self_attn.o_proj": [32, 64],
}


def test_latent_attention_caches_the_latent_and_one_rotary_key():
    assert cache_of(stack(LATENT), {"model_type": "deepseek_v3"}) == [100 * (16 + 4) * 2]


def test_sparse_attention_caches_the_keys_of_its_indexer_too():
    block = LATENT | {"self_attn.indexer.wk": [8, 32], "self_attn.indexer.wq_b": [64, 16]}
    assert cache_of(stack(block), {"model_type": "deepseek_v32"}) == [100 * (16 + 4 + 8) * 2]


def packed(**sizes):
    """Return a 4-bit block as bitsandbytes stores it: two numbers a byte, in one column."""
    return {"norm": [32]} | {
        f"self_attn.{name}_proj.weight{tail}": ("U8", shape)
        for name, rows in sizes.items()
        for tail, shape in (("", [rows * 32 // 2, 1]), (".absmax", [rows // 2]))
    }


AWQ = {
    "norm": [32],
    **{f"self_attn.{name}_proj.qweight": ("I32", [32, rows // 8]) for name, rows in (("q", 32), ("k", 16), ("v", 16))},
    **{f"self_attn.{name}_proj.scales": ("F16", [1, rows]) for name, rows in (("q", 32), ("k", 16), ("v", 16))},
}
HEADS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "torch_dtype": "bfloat16"}


def test_packed_shapes_are_no_widths_and_the_config_counts_heads():
    assert cache_of(stack(packed(q=32, k=16, v=16)), PLAIN | HEADS) == [6400]


def test_scales_tell_the_width_of_packed_weights():
    assert cache_of(stack(AWQ), PLAIN | {"torch_dtype": "float16"}) == [6400]


def test_packed_weights_without_heads_in_the_config_are_said_to_be_unknown():
    found = memory_of(stack(*[packed(q=32, k=16, v=16)] * 3), PLAIN | {"torch_dtype": "bfloat16"})
    assert found.cache_bytes == {}
    assert found.unknown[0] == (
        "model.layers.0 and 2 more blocks: neither shapes nor config tell the width of keys and values; not counted"
    )


def layers(num_layers):
    return stack(*[attention()] * num_layers)


def tokens_of(tensors, config, workload=LONG):
    """Return how many tokens each block keeps of `ALL`: an element takes 2 bytes, a token 32 elements."""
    return [num_bytes // 64 for num_bytes in cache_of(tensors, config, workload)]


def behind(window):
    """Return what a window keeps of a long prompt: a token less than it reaches, and the chunk that came last."""
    return window - 1 + PREFILL_CHUNK


def test_a_window_keeps_one_token_less_than_it_reaches_and_the_last_chunk():
    assert tokens_of(layers(2), {"model_type": "mistral", "sliding_window": 16}) == [behind(16)] * 2


@pytest.mark.parametrize("context", [100, PREFILL_CHUNK, PREFILL_CHUNK + 15])
def test_a_window_keeps_a_prompt_of_one_chunk_whole(context):
    found = tokens_of(layers(1), {"model_type": "mistral", "sliding_window": 16}, Workload(context=context))
    assert found == [context]


def test_a_window_that_is_not_full_keeps_all():
    assert tokens_of(layers(1), {"model_type": "mistral", "sliding_window": 16}, Workload(context=10)) == [10]


def test_listed_layers_decide_which_have_a_window():
    listed = ["full_attention", "sliding_attention", "chunked_attention"]
    config = {"model_type": "x", "layer_types": listed, "sliding_window": 16, "attention_chunk_size": 32}
    assert tokens_of(layers(3), config) == [ALL, behind(16), behind(32)]


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"model_type": "gemma2", "sliding_window": 16}, [behind(16), ALL, behind(16), ALL]),
        (
            {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 3},
            [behind(16), behind(16), ALL, behind(16)],
        ),
        ({"model_type": "llama4", "attention_chunk_size": 16}, [behind(16), behind(16), behind(16), ALL]),
        (
            {"model_type": "exaone4", "sliding_window": 16, "sliding_window_pattern": "LLLG"},
            [behind(16), behind(16), behind(16), ALL],
        ),
        ({"model_type": "qwen2", "sliding_window": 16}, [ALL] * 4),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False}, [ALL] * 4),
        (
            {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
            [ALL, ALL, ALL, behind(16)],
        ),
        ({"model_type": "mixtral", "sliding_window": None}, [ALL] * 4),
        (
            {"model_type": "llava", "text_config": {"model_type": "gemma2", "sliding_window": 16}},
            [behind(16), ALL, behind(16), ALL],
        ),
    ],
)
def test_families_that_do_not_list_their_layers_have_rules(config, tokens):
    assert tokens_of(layers(4), config) == tokens


def test_a_window_of_unknown_reach_is_counted_as_full_and_said_so():
    found = memory_of(layers(1), {"model_type": "x", "layer_types": ["sliding_attention"], "sliding_window": "wide"})
    assert list(found.cache_bytes.values()) == [6400]
    assert "does not tell how far its sliding_attention reaches; the whole context is counted" in found.unknown[0]


def test_an_attention_of_unknown_kind_is_counted_as_full_and_said_so():
    found = memory_of(layers(1), {"model_type": "x", "layer_types": ["telepathic"]})
    assert list(found.cache_bytes.values()) == [6400]
    assert '"telepathic", which bigload does not know; counted as full' in found.unknown[0]


MAMBA = {"norm": [32], "mixer.conv1d": [64, 1, 4], "mixer.A_log": [64, 8], "mixer.in_proj": [128, 32]}


def test_the_state_of_mamba_does_not_grow_with_the_context():
    block = MAMBA | {"mixer.out_proj": [32, 64]}
    # 64 channels x 4 columns of the kernel in 16 bits, 64 x 8 of state in 32 bits
    for context in (1, 100):
        assert cache_of(stack(block), {"model_type": "mamba"}, Workload(context=context)) == [512 + 2048]


@pytest.mark.parametrize("config", [{"state_size": 16}, {"n_groups": 2}])
def test_the_state_of_mamba_2_is_told_by_the_config_or_by_its_groups(config):
    # 64 channels, and two groups of two vectors of 16 beside them: 128 channels of convolution
    block = {"norm": [32], "mixer.conv1d": [128, 1, 4], "mixer.A_log": [8], "mixer.in_proj": [200, 32]}
    tensors = stack(block | {"mixer.out_proj": [32, 64]})
    assert cache_of(tensors, {"model_type": "mamba2", **config}) == [128 * 4 * 2 + 64 * 16 * 4]


@pytest.mark.parametrize("config", [{"linear_key_head_dim": 8}, {"linear_num_key_heads": 2}])
def test_a_delta_rule_keeps_a_matrix_of_keys_by_values_per_head(config):
    linear = {
        "norm": [32],
        "linear_attn.conv1d": [96, 1, 4],
        "linear_attn.A_log": [4],
        "linear_attn.in_proj_qkvz": [160, 32],
        "linear_attn.out_proj": [32, 64],
    }
    # 4 heads of 8 keys by 16 values; 16 queries, 16 keys and 64 values pass the convolution
    config = {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"], **config}
    assert cache_of(stack(linear, attention()), config) == [96 * 4 * 2 + 4 * 8 * 16 * 4, 6400]


def test_a_delta_rule_with_projections_of_its_own_takes_their_width():
    block = attention(query=64, key=64) | {"self_attn.A_log": [1, 1, 4, 1]}
    block |= {f"self_attn.{name}_conv1d": [64, 1, 4] for name in "qkv"}
    assert cache_of(stack(block), {"model_type": "kimi_linear"}) == [3 * 64 * 4 * 2 + 4 * 16 * 16 * 4]


LINEAR = {"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"]}


def test_linear_attention_keeps_a_matrix_per_head():
    # 32 queries wide, keys of 8: 4 heads of 8 x 8
    assert cache_of(stack(attention(), attention()), LINEAR | {"head_dim": 8}) == [32 * 8 * 2, 6400]


def test_linear_attention_without_a_head_size_is_said_to_be_unknown():
    found = memory_of(stack(attention(), attention()), LINEAR)
    assert found.unknown == (
        "model.layers.0: neither shapes nor config tell the state of linear attention; not counted",
    )


def test_a_layer_that_the_config_calls_empty_keeps_nothing():
    assert cache_of(layers(2), {"model_type": "x", "layer_types": ["mlp", "full_attention"]}) == [6400]


def test_keys_and_values_may_come_from_one_projection():
    block = {"norm": [32], "attn.q_proj": [32, 32], "attn.kv_proj": [32, 32], "attn.o_proj": [32, 32]}
    assert cache_of(stack(block), PLAIN) == [6400]


def test_a_short_convolution_keeps_its_kernel_only():
    block = {"norm": [32], "conv.conv": [32, 1, 3], "conv.in_proj": [96, 32], "conv.out_proj": [32, 32]}
    assert cache_of(stack(block), {"model_type": "lfm2"}) == [32 * 3 * 2]


def test_mamba_beside_attention_keeps_both():
    block = MAMBA | {"mixer.out_proj": [32, 64]} | attention()
    assert cache_of(stack(block), {"model_type": "hymba"}) == [512 + 2048 + 6400]


def test_a_shared_attention_has_a_cache_in_every_block_that_uses_it():
    mamba = MAMBA | {"mixer.out_proj": [32, 64]}
    blocks = stack(mamba, mamba | attention(under="shared.self_attn"), mamba | {"linear": [32, 32]})
    config = {"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid", "hybrid"]}
    assert cache_of(blocks, config) == [2560, 2560 + 6400, 2560 + 6400]


def test_recurrent_state_of_unknown_size_is_said_to_be_unknown():
    block = {"norm": [32], "mixer.conv1d": [128, 1, 4], "mixer.A_log": [8], "mixer.out_proj": [32, 64]}
    found = memory_of(stack(block), {"model_type": "mamba2"})
    assert found.unknown[0] == "model.layers.0: neither shapes nor config tell the recurrent state; not counted"


def test_layers_without_attention_keep_nothing():
    mlp = {"norm": [32], "mixer.up_proj": [64, 32], "mixer.down_proj": [32, 64]}
    config = {"model_type": "nemotron_h", "layers_block_type": ["attention", "mlp"]}
    assert cache_of(stack(attention(under="mixer"), mlp), config) == [6400]


def t5():
    def t5_attention(layer, kind):
        return {f"layer.{layer}.{kind}.{name}": [32, 32] for name in "qkvo"}

    encoder = stack(*[t5_attention(0, "SelfAttention")] * 2, prefix="encoder.block")
    return encoder | stack(
        *[t5_attention(0, "SelfAttention") | t5_attention(1, "EncDecAttention")] * 2, prefix="decoder.block"
    )


def test_a_decoder_keeps_its_own_tokens_and_those_of_the_encoder():
    found = memory_of(t5(), {"model_type": "t5", "num_layers": 2, "is_encoder_decoder": True})
    assert found.cache_bytes == {f"decoder.block.{index}": 2 * 100 * (32 + 32) * 2 for index in range(2)}


def test_an_encoder_of_sound_gives_as_many_tokens_as_it_always_does():
    block = attention(key=32) | attention(key=32, under="encoder_attn")
    config = {"model_type": "whisper", "num_mel_bins": 80, "max_source_positions": 15, "decoder_layers": 1}
    tensors = stack(block, prefix="model.decoder.layers")
    assert cache_of(tensors, config) == [(100 + 15) * 64 * 2]


def test_cross_attention_to_an_image_keeps_the_tokens_of_all_its_tiles():
    config = {
        "model_type": "mllama",
        "text_config": {"model_type": "mllama_text_model", "num_hidden_layers": 2},
        "vision_config": {"image_size": 28, "patch_size": 14, "max_num_tiles": 4},
    }
    tensors = stack(attention(), attention(under="cross_attn"), prefix="language_model.model.layers")
    tensors |= stack(attention(key=32), prefix="vision_model.transformer.layers")
    # 4 tiles of 2 x 2 patches and one token more
    assert cache_of(tensors, config) == [6400, 4 * 5 * 32 * 2]


@pytest.mark.parametrize(
    ("prefix", "config"),
    [
        ("bert.encoder.layer", {"model_type": "bert", "architectures": ["BertForMaskedLM"]}),
        ("encoder.layer", {"model_type": "vit", "architectures": ["ViTModel"]}),
        ("vision_tower.vision_model.encoder.layers", {"model_type": "llava"}),
        ("model.visual.blocks", {"model_type": "qwen2_5_vl"}),
        ("audio_tower.layers", {"model_type": "qwen2_audio"}),
        ("distilbert.transformer.layer", {"model_type": "distilbert"}),
        ("layers", {"model_type": "unheard_of", "architectures": ["SomeForMaskedLM"]}),
        ("mtp.layers", {"model_type": "qwen3_5"}),
    ],
)
def test_encoders_and_towers_keep_nothing(prefix, config):
    assert cache_of(stack(attention(), prefix=prefix), {**config, "vocab_size": 96}) == []


@pytest.mark.parametrize(
    "config",
    [{"model_type": "chatglm"}, {"model_type": "bert", "is_decoder": True, "architectures": ["BertLMHeadModel"]}],
)
def test_a_decoder_may_be_called_encoder(config):
    assert cache_of(stack(attention(), prefix="transformer.encoder.layers"), config) == [6400]


def test_blocks_that_predict_further_tokens_keep_nothing():
    tensors = stack(attention(), attention(), attention() | {"eh_proj": [32, 64], "enorm": [32]})
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    assert cache_of(tensors, config) == [6400, 6400]


def test_blocks_past_the_layers_of_the_config_are_pointed_out():
    found = memory_of(layers(3), PLAIN | {"num_hidden_layers": 2})
    assert list(found.cache_bytes) == ["model.layers.0", "model.layers.1"]
    assert "model.layers.2: the config counts 2 layers" in found.unknown[0]


def test_layers_that_share_the_cache_of_another_keep_nothing():
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 3, "num_kv_shared_layers": 1}
    assert tokens_of(layers(3), config) == [ALL, ALL]


def test_values_made_of_keys_are_cached_beside_them():
    block = {name: shape for name, shape in attention().items() if "v_proj" not in name}
    assert cache_of(stack(block), {"model_type": "gemma4_text"}) == [6400]


def test_routed_experts_are_no_attention():
    block = attention() | {f"mlp.experts.{index}.key": [64, 32] for index in range(2)}
    assert cache_of(stack(block), PLAIN) == [6400]


def test_a_state_of_its_own_kind_is_said_to_be_unknown():
    block = {"ln1": [32], "attention.key": [32, 32], "attention.value": [32, 32], "attention.receptance": [32, 32]}
    found = memory_of(stack(block, prefix="rwkv.blocks"), {"model_type": "rwkv"})
    assert found.cache_bytes == {}
    assert found.unknown[0] == "rwkv.blocks.0: the state of this family is not known; not counted"


def test_blocks_without_attention_are_pointed_out():
    found = memory_of(stack({"a.b": [32, 32]}, {"a.b": [32, 32]}), PLAIN)
    assert found.cache_bytes == {}
    assert "no attention and no recurrence was recognised" in found.unknown[0]
