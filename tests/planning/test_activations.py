"""What a block holds while it runs: a model 8 wide, 100 tokens and 16-bit floats unless a test says otherwise."""

import pytest

from bigload.dtypes import DTYPES
from bigload.planning.activations import PREFILL_CHUNK, BlockActivations, block_activations
from bigload.planning.block_shapes import read_block
from bigload.planning.model_config import ModelConfig
from bigload.planning.tree import build_tree
from bigload.planning.workload import Workload
from builders import checkpoint_of

HUNDRED = Workload(context=100)
STREAM = 4 * 8
"""Elements per token of the residual stream and of what goes into a layer."""


def activations_of(shapes, config=None, *, max_tokens=None):
    tensors = checkpoint_of({f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()}).tensors
    return block_activations(read_block(build_tree(tensors.values())), max_tokens, ModelConfig(config))


def bytes_of(shapes, workload=HUNDRED, *, dtype="BF16", **options):
    return activations_of(shapes, **options).num_bytes(workload, DTYPES[dtype])


GROUPED = {"attn.q_proj": [8, 8], "attn.k_proj": [2, 8], "attn.v_proj": [2, 8], "attn.o_proj": [8, 8]}
EVERY_HEAD = GROUPED | {"attn.k_proj": [8, 8], "attn.v_proj": [8, 8]}
PLAIN = {"mlp.up_proj": [64, 8], "mlp.down_proj": [8, 64]}
LATENT = {"attn.q_proj": [24, 8], "attn.kv_a_proj_with_mqa": [6, 8], "attn.kv_b_proj": [32, 4], "attn.o_proj": [8, 16]}


def test_a_plain_feed_forward_holds_both_sides_of_its_function():
    assert bytes_of(GROUPED | PLAIN) == 100 * (STREAM + 2 * 64) * 2


def test_a_gated_feed_forward_holds_the_product_too():
    assert bytes_of(GROUPED | PLAIN | {"mlp.gate_proj": [64, 8]}) == 100 * (STREAM + 3 * 64) * 2


def test_a_fused_gate_stays_while_its_halves_are_multiplied():
    assert bytes_of(GROUPED | {"mlp.gate_up_proj": [128, 8]}) == 100 * (STREAM + 4 * 64) * 2


def test_attention_counts_where_it_holds_more():
    assert bytes_of(GROUPED) == 100 * (STREAM + 2 * (8 + 4)) * 2


def test_a_token_is_copied_for_every_expert_that_is_chosen():
    config = {"num_experts_per_tok": 4, "moe_intermediate_size": 16}
    assert bytes_of(GROUPED, config=config) == 100 * (STREAM + 4 * (4 * 16 + 8)) * 2
    assert bytes_of(GROUPED, config=config | {"moe_intermediate_size": 2}) == 100 * (STREAM + 4 * 6 * 8) * 2


def test_batch_and_dtype_scale_everything():
    assert bytes_of(GROUPED, Workload(context=100, batch=3), dtype="F32") == 3 * 100 * (STREAM + 2 * 12) * 4


def test_the_chunk_bounds_what_a_feed_forward_makes():
    two_chunks = Workload(context=2 * PREFILL_CHUNK)
    mask = PREFILL_CHUNK * 2 * PREFILL_CHUNK
    assert bytes_of(GROUPED | PLAIN, two_chunks) == PREFILL_CHUNK * (STREAM + 2 * 64) * 2 + mask


@pytest.mark.parametrize(
    ("shapes", "projected", "read"),
    [
        (GROUPED, 2 * (8 + 4), 8 + 8),  # repeated for every query head
        (EVERY_HEAD, 2 * (8 + 16), 8),  # keys are copied when they grow
        (LATENT, 2 * (24 + 32), 32 + 24),  # expanded from the latent
    ],
)
def test_past_one_chunk_attention_reads_the_whole_context(shapes, projected, read):
    context = 3 * PREFILL_CHUNK
    expected = PREFILL_CHUNK * (STREAM + projected) * 2 + context * read * 2 + PREFILL_CHUNK * context
    assert bytes_of(shapes, Workload(context=context)) == expected


def test_a_window_bounds_what_attention_reads():
    cached = 100 + PREFILL_CHUNK
    expected = PREFILL_CHUNK * (STREAM + 2 * 12) * 2 + cached * 16 * 2 + PREFILL_CHUNK * cached
    assert bytes_of(GROUPED, Workload(context=10 * PREFILL_CHUNK), max_tokens=100) == expected


def test_the_config_tells_widths_that_shapes_do_not():
    config = {"hidden_size": 8, "intermediate_size": 64}
    assert bytes_of({"norm": [8]}, config=config) == 100 * (STREAM + 3 * 64) * 2
    assert activations_of({"norm": [8]}) is None


def test_a_recurrence_has_no_mask_that_grows_with_the_context():
    block = BlockActivations(feed_forward=1, attention=1, per_cached_token=0, max_tokens=None)
    chunk, longer = (block.num_bytes(Workload(context=tokens), DTYPES["BF16"]) for tokens in (PREFILL_CHUNK, 2**20))
    assert chunk == longer
