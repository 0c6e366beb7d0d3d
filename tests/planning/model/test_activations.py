"""Memory of a running block: a model 8 wide, 100 tokens and 16-bit floats unless a test says otherwise."""

from dataclasses import replace

import pytest

from bigload.dtypes import DTYPES
from bigload.planning.choices import Attention
from bigload.planning.model.activations import block_activations, mask_bytes
from bigload.planning.model.attention_memory import default_attention
from bigload.planning.model.block_shapes import read_block
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.kv_cache import BlockCache
from bigload.planning.model.module_tree import build_tree
from bigload.planning.workload import PREFILL_CHUNK, Workload
from builders import checkpoint_of

HUNDRED = Workload(context=100)
STREAM = 5 * 8
"""Elements per token of the residual stream and of what goes into a layer."""

CACHE = BlockCache(block="b", per_token=4, dtype=DTYPES["BF16"])


def activations_of(shapes, config=None, *, cache=CACHE, has_positions=False, is_biased=False):
    tensors = checkpoint_of({f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()}).tensors
    block = read_block(build_tree(tensors))
    return block_activations(block, cache, ModelConfig(config), has_positions=has_positions, is_biased=is_biased)


def bytes_of(shapes, workload=HUNDRED, *, dtype="BF16", attention=Attention.SDPA, **options):
    found = activations_of(shapes, **options)
    return found.num_bytes(workload, workload.context, DTYPES[dtype], attention)


GROUPED = {"attn.q_proj": [8, 8], "attn.k_proj": [2, 8], "attn.v_proj": [2, 8], "attn.o_proj": [8, 8]}
EVERY_HEAD = GROUPED | {"attn.k_proj": [8, 8], "attn.v_proj": [8, 8]}
PLAIN = {"mlp.up_proj": [64, 8], "mlp.down_proj": [8, 64]}
LATENT = {"attn.q_proj": [24, 8], "attn.kv_a_proj_with_mqa": [6, 8], "attn.kv_b_proj": [32, 4], "attn.o_proj": [8, 16]}
ROTATED = 8 + 3 * 8 + 8
"""Queries 8 wide, three temporary copies of them, and keys and values, for which at least as much is counted."""


@pytest.mark.parametrize(
    ("shapes", "width"),
    [
        (PLAIN, 2 * 64),
        ({"layer.intermediate.dense": [64, 8]}, 2 * 64),
        (PLAIN | {"mlp.gate_proj": [64, 8]}, 3 * 64),
        ({"mlp.gate_up_proj": [128, 8]}, 4 * 64),
    ],
    ids=["both sides of the function", "of bert", "the product with the gate too", "a fused gate beside its halves"],
)
def test_a_feed_forward_holds_what_its_form_makes(shapes, width):
    assert bytes_of(GROUPED | shapes) == 100 * (STREAM + width) * 2


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"hidden_act": "gelu"}, 2 * 64),
        ({"activation_function": "gelu_new"}, 4 * 64),
        ({"feed_forward_proj": "gated-gelu"}, 4 * 64),
        ({"hidden_act": "quick_gelu"}, 3 * 64),
        ({"model_type": "bloom"}, 5 * 64),
    ],
)
def test_a_function_composed_of_several_operations_holds_their_results(config, width):
    assert bytes_of(GROUPED | PLAIN, config=config) == 100 * (STREAM + width) * 2


def test_attention_counts_where_it_holds_more():
    assert bytes_of(GROUPED) == 100 * (STREAM + ROTATED) * 2


def test_embeddings_of_positions_live_as_long_as_those_of_words():
    assert bytes_of(GROUPED, has_positions=True) == 100 * (STREAM + 8 + ROTATED) * 2


def test_a_token_is_copied_for_every_expert_that_is_chosen():
    config = {"num_experts_per_tok": 4, "moe_intermediate_size": 16}
    assert bytes_of(GROUPED, config=config) == 100 * (STREAM + 4 * (4 * 16 + 8)) * 2
    assert bytes_of(GROUPED, config=config | {"moe_intermediate_size": 2}) == 100 * (STREAM + 4 * 6 * 8) * 2


def test_llama_4_passes_every_token_through_every_expert():
    config = {"model_type": "llama4_text", "num_experts_per_tok": 1, "num_local_experts": 6, "intermediate_size": 16}
    assert bytes_of(GROUPED, config=config) == 100 * (STREAM + 6 * (4 * 16 + 8)) * 2


def test_batch_and_dtype_scale_everything():
    shapes = GROUPED | {"mlp.up_proj": [640, 8]}
    one, three = (bytes_of(shapes, Workload(context=100, batch=batch), dtype="F32") for batch in (1, 3))
    assert one == 100 * (STREAM + 2 * 640) * 4
    assert three == 3 * one


def test_the_chunk_bounds_what_a_feed_forward_makes():
    wide = {"mlp.up_proj": [6400, 8]}
    found = bytes_of(GROUPED | wide, Workload(context=2 * PREFILL_CHUNK))
    assert found == PREFILL_CHUNK * (STREAM + 2 * 6400) * 2


@pytest.mark.parametrize(
    ("shapes", "cached", "made", "read"),
    [
        (GROUPED, 4, 3 * 8, 8 + 8),  # repeated for every query head
        (EVERY_HEAD, 16, 3 * 8, 0),  # read where they are cached
        (LATENT, 6, 3 * 24, 32 + 24),  # expanded from the latent
    ],
)
def test_past_one_chunk_attention_reads_the_whole_context_through_a_mask(shapes, cached, made, read):
    context = 3 * PREFILL_CHUNK
    mask = PREFILL_CHUNK * context * 2
    expected = PREFILL_CHUNK * (STREAM + made) * 2 + context * read * 2 + mask
    assert bytes_of(shapes, Workload(context=context), cache=replace(CACHE, per_token=cached)) == expected


def test_a_cache_grows_by_a_copy_of_one_half():
    context = 100 * PREFILL_CHUNK
    wide = {name: [512 * size for size in shape] for name, shape in EVERY_HEAD.items()}
    found = bytes_of(wide, Workload(context=context), cache=replace(CACHE, per_token=8192))
    assert found == PREFILL_CHUNK * (5 * 4096 + 3 * 4096) * 2 + (context - PREFILL_CHUNK) * 4096 * 2


def test_a_window_bounds_what_attention_reads():
    cached = 100 + PREFILL_CHUNK
    mask = PREFILL_CHUNK * cached * 2 * 2  # in numbers, and those once more, padded
    expected = PREFILL_CHUNK * (STREAM + 3 * 8) * 2 + cached * 16 * 2 + mask
    windowed = replace(CACHE, max_tokens=100)
    assert bytes_of(GROUPED, Workload(context=10 * PREFILL_CHUNK), cache=windowed) == expected


@pytest.mark.parametrize(
    ("dtype", "of_scores"),
    [("BF16", 2 + 4 + 4), ("F32", 4 + 4)],  # scores, their copy in 32 bits, the softmax
)
def test_eager_attention_stores_scores_of_every_head(dtype, of_scores):
    config, width = {"num_attention_heads": 4}, DTYPES[dtype].bits // 8
    found = bytes_of(GROUPED, Workload(context=1000), config=config, attention=Attention.EAGER, dtype=dtype)
    assert found == 1000 * (STREAM + 3 * 8 + 2 * 8) * width + 4 * 1000 * 1000 * of_scores


@pytest.mark.parametrize(
    ("installed", "expected"), [("5.23.1", Attention.EAGER), ("5.24.0", Attention.SDPA), (None, Attention.SDPA)]
)
def test_attention_that_a_release_has_made_fused_is_counted_as_the_installed_one_computes_it(
    installed, expected, monkeypatch
):
    monkeypatch.setattr("bigload.planning.model.attention_memory.installed_version", lambda _: installed)
    assert default_attention(ModelConfig({"model_type": "gptj"})) is expected
    assert default_attention(ModelConfig({"model_type": "gpt_oss"})) is Attention.EAGER


def test_eager_attention_returns_weights_that_live_through_the_feed_forward():
    shapes, config = GROUPED | {"mlp.up_proj": [10**6, 8]}, {"num_attention_heads": 4}
    eager, fused = (bytes_of(shapes, config=config, attention=kind) for kind in (Attention.EAGER, Attention.SDPA))
    assert eager == fused + 4 * 100 * 100 * 2


def test_fused_attention_with_a_bias_stores_it_and_a_copy():
    config = {"num_attention_heads": 4}
    biased, plain = (bytes_of(GROUPED, Workload(context=2000), config=config, is_biased=b) for b in (True, False))
    assert biased == 2000 * (STREAM + 3 * 8) * 2 + 4 * 2000 * 2000 * 2 * 2
    assert plain < biased


def test_a_rotation_in_32_bits_holds_queries_four_times_and_keys_once():
    rotated = (8 + 4) * 2 + (4 * 8 + 2) * 4
    assert bytes_of(GROUPED, config={"model_type": "cohere"}) == 100 * (STREAM * 2 + rotated)


def test_gemma_embeds_words_for_every_layer_too():
    config = {"hidden_size_per_layer_input": 16, "num_hidden_layers": 3}
    assert bytes_of(GROUPED, config=config) - bytes_of(GROUPED) == 100 * 2 * 3 * 16 * 2


def test_a_model_that_says_it_has_no_experts_copies_nothing_for_them():
    config = {"is_moe": False, "num_experts_per_tok": 64, "moe_intermediate_size": 16}
    assert bytes_of(GROUPED, config=config) == bytes_of(GROUPED)


def test_no_kernel_broadcasts_the_only_head_of_keys_of_falcon():
    config = {"model_type": "falcon", "num_attention_heads": 4}
    assert bytes_of(GROUPED, Workload(context=1000), config=config) == 1000 * (STREAM + 3 * 8) * 2 + 4 * 1000 * 1000 * 8


def test_a_gate_beside_the_queries_is_not_repeated_for_them():
    context = 100 * PREFILL_CHUNK
    gated = bytes_of(GROUPED | {"attn.q_proj": [16, 8]}, Workload(context=context))
    assert gated - bytes_of(GROUPED, Workload(context=context)) == PREFILL_CHUNK * 8 * 2


def test_an_encoder_reads_its_input_at_once_and_without_a_mask():
    context = 3 * PREFILL_CHUNK
    assert bytes_of(GROUPED | PLAIN, Workload(context=context), cache=None) == context * (STREAM + 2 * 64) * 2


def test_the_decoder_of_an_encoder_decoder_reads_a_token_at_a_time():
    config = {"is_encoder_decoder": True}
    assert bytes_of(EVERY_HEAD | PLAIN, config=config, cache=replace(CACHE, per_token=16)) < 100 * STREAM * 2


MAMBA = {"mixer.conv1d": [16, 1, 4], "mixer.in_proj": [32, 8], "mixer.out_proj": [8, 16]}


def scan_bytes(decay, state, config=None, tokens=512, **shapes):
    tensors = {f"{name}.weight": ("BF16", shape) for name, shape in (MAMBA | shapes).items()}
    block = read_block(build_tree(checkpoint_of(tensors | {"mixer.A_log": ("F32", decay)}).tensors))
    cache = BlockCache(block="b", wide_state=state, dtype=DTYPES["BF16"])
    known = ModelConfig({"hidden_size": 8, **(config or {})})
    found = block_activations(block, cache, known, has_positions=False, is_biased=False)
    assert found.scans[0].is_scan
    return found.num_bytes(Workload(context=tokens), tokens, DTYPES["BF16"], Attention.SDPA)


def test_mamba_without_a_kernel_holds_the_states_of_every_token_three_times():
    wide = 3 * 16 * 4 + 2 * 16
    assert scan_bytes([16, 4], 16 * 4) == 512 * ((STREAM + 6 * 16) * 2 + wide * 4)


@pytest.mark.parametrize(("config", "piece"), [({}, 256), ({"chunk_size": 128}, 128)])
def test_mamba_2_without_a_kernel_holds_products_within_pieces_of_a_chunk(config, piece):
    convolved = {"mixer.conv1d": [32, 1, 4]}
    wide = 2 * 3 * (8 + piece) + 7 * 16
    assert scan_bytes([2], 16 * 8, config, **convolved) == 512 * ((STREAM + 16 + 2 * 32) * 2 + wide * 4)
    padded = 512 + piece - 512 % piece
    found = scan_bytes([2], 16 * 8, config, tokens=513, **convolved)
    assert found == 513 * (STREAM + 16 + 2 * 32) * 2 + max(padded, 513) * wide * 4


def test_the_config_tells_widths_that_shapes_do_not():
    config = {"hidden_size": 8, "intermediate_size": 64}
    assert bytes_of({"norm": [8]}, config=config) == 100 * (STREAM + 3 * 64) * 2
    assert activations_of({"norm": [8]}) is None


@pytest.mark.parametrize(
    ("workload", "max_tokens", "pairs"),
    [
        (Workload(context=PREFILL_CHUNK), None, 0),  # all see all of their past: a flag is enough
        (Workload(context=100, batch=3), None, 3 * 100 * 100),  # sequences of unlike lengths are padded
        (Workload(context=100), 99, 100 * 100),
        (Workload(context=2 * PREFILL_CHUNK), None, 2 * PREFILL_CHUNK**2),
        (Workload(context=2 * PREFILL_CHUNK), 99, PREFILL_CHUNK * (99 + PREFILL_CHUNK)),
    ],
)
def test_a_mask_is_of_booleans_for_a_kernel_and_of_numbers_for_eager_attention(workload, max_tokens, pairs):
    assert mask_bytes(workload, max_tokens, 2, Attention.SDPA) == pairs
    assert mask_bytes(workload, max_tokens, 2, Attention.EAGER) == 2 * pairs
