"""Tensor names of well-known families, a few of each: the tree knows no architecture, and has to do for all of them."""

import pytest

from bigload.planning.model.module_tree import build_tree
from bigload.planning.model.units import cut_into_units
from bigload.planning.plan import recount
from bigload.planning.planner import plan
from builders import checkpoint_of, llama_config, llama_tensors

TABLE = ("BF16", [32, 4])


def blocks(prefix, count, *parts):
    return {f"{prefix}.{index}.{part}": 8 for index in range(count) for part in parts}


def config(model_type, architecture, **more):
    return {"model_type": model_type, "architectures": [architecture], **more}


FAMILIES = {
    "llama": (
        llama_tensors(blocks=3),
        llama_config(),
        "model.embed_tokens model.layers.0 model.layers.1 model.layers.2 model.norm lm_head",
    ),
    "gpt2": (
        {
            "wte.weight": TABLE,
            "wpe.weight": 8,
            **blocks("h", 2, "ln_1.weight", "attn.bias", "attn.c_attn.weight"),
            "ln_f.weight": 8,
            "ln_f.bias": 8,
        },
        config("gpt2", "GPT2LMHeadModel"),
        "wpe wte h.0 h.1 ln_f lm_head",
    ),
    "bloom": (
        {
            "word_embeddings.weight": TABLE,
            "word_embeddings_layernorm.weight": 8,
            **blocks("h", 2, "self_attention.dense.weight", "mlp.dense_h_to_4h.weight"),
            "ln_f.weight": 8,
        },
        config("bloom", "BloomForCausalLM"),
        "word_embeddings word_embeddings_layernorm h.0 h.1 ln_f lm_head",
    ),
    "t5": (
        {
            "shared.weight": TABLE,
            **blocks("encoder.block", 2, "layer.0.SelfAttention.q.weight", "layer.1.DenseReluDense.wi.weight"),
            "encoder.final_layer_norm.weight": 8,
            **blocks("decoder.block", 2, "layer.0.SelfAttention.q.weight", "layer.1.EncDecAttention.q.weight"),
            "decoder.final_layer_norm.weight": 8,
            "lm_head.weight": TABLE,
        },
        config("t5", "T5ForConditionalGeneration", tie_word_embeddings=False),
        "shared encoder.embed_tokens encoder.block.0 encoder.block.1 encoder.final_layer_norm "
        "decoder.embed_tokens decoder.block.0 decoder.block.1 decoder.final_layer_norm lm_head",
    ),
    "bert": (
        {
            "bert.embeddings.word_embeddings.weight": TABLE,
            "bert.embeddings.LayerNorm.weight": 8,
            **blocks("bert.encoder.layer", 2, "attention.self.query.weight", "output.dense.weight"),
            "bert.pooler.dense.weight": 8,
            "cls.predictions.bias": 8,
            "cls.predictions.transform.dense.weight": 8,
        },
        config("bert", "BertForMaskedLM"),
        "bert.embeddings bert.encoder.layer.0 bert.encoder.layer.1 bert.pooler cls",
    ),
    "llava": (
        {
            "vision_tower.vision_model.embeddings.class_embedding": 8,
            **blocks("vision_tower.vision_model.encoder.layers", 2, "self_attn.q_proj.weight"),
            "vision_tower.vision_model.post_layernorm.weight": 8,
            "multi_modal_projector.linear_1.weight": 8,
            "language_model.model.embed_tokens.weight": TABLE,
            **blocks("language_model.model.layers", 2, "self_attn.q_proj.weight"),
            "language_model.model.norm.weight": 8,
            "language_model.lm_head.weight": TABLE,
        },
        config("llava", "LlavaForConditionalGeneration", tie_word_embeddings=False),
        "vision_tower.vision_model.embeddings vision_tower.vision_model.encoder.layers.0 "
        "vision_tower.vision_model.encoder.layers.1 vision_tower.vision_model.post_layernorm multi_modal_projector "
        "language_model.model.embed_tokens language_model.model.layers.0 language_model.model.layers.1 "
        "language_model.model.norm language_model.lm_head",
    ),
    "mixtral": (
        {
            "model.embed_tokens.weight": TABLE,
            **blocks(
                "model.layers",
                2,
                "self_attn.q_proj.weight",
                "block_sparse_moe.gate.weight",
                "block_sparse_moe.experts.0.w1.weight",
                "block_sparse_moe.experts.1.w1.weight",
            ),
            "model.norm.weight": 8,
            "lm_head.weight": TABLE,
        },
        config("mixtral", "MixtralForCausalLM", tie_word_embeddings=False),
        "model.embed_tokens model.layers.0 model.layers.1 model.norm lm_head",
    ),
    "deepseek": (
        {
            "model.embed_tokens.weight": TABLE,
            **blocks("model.layers", 2, "self_attn.q_a_proj.weight", "mlp.experts.0.up_proj.weight"),
            "model.layers.2.self_attn.q_a_proj.weight": 8,
            "model.layers.2.enorm.weight": 8,
            "model.layers.2.eh_proj.weight": 8,
            "model.layers.2.embed_tokens.weight": TABLE,
            "model.layers.2.shared_head.head.weight": TABLE,
            "model.norm.weight": 8,
            "lm_head.weight": TABLE,
        },
        config("deepseek_v3", "DeepseekV3ForCausalLM", tie_word_embeddings=False),
        "model.embed_tokens model.layers.0 model.layers.1 model.layers.2 model.norm lm_head",
    ),
    "sam": (
        {
            "no_memory_embedding": 8,
            "memory_temporal_positional_encoding": 8,
            "vision_encoder.pos_embed": 8,
            "vision_encoder.patch_embed.projection.weight": 8,
            **blocks("vision_encoder.layers", 2, "attn.qkv.weight", "mlp.lin1.weight"),
            "prompt_encoder.point_embed.weight": 8,
            **blocks("mask_decoder.transformer.layers", 2, "self_attn.q_proj.weight"),
            "mask_decoder.iou_token.weight": 8,
        },
        config("sam2", "Sam2Model"),
        "memory_temporal_positional_encoding no_memory_embedding vision_encoder.pos_embed vision_encoder.patch_embed "
        "vision_encoder.layers.0 vision_encoder.layers.1 prompt_encoder mask_decoder.iou_token "
        "mask_decoder.transformer.layers.0 mask_decoder.transformer.layers.1",
    ),
}
"""Tensors, config, and the keys that a device map has to have."""


@pytest.fixture(params=FAMILIES)
def family(request):
    tensors, settings, keys = FAMILIES[request.param]
    return checkpoint_of(tensors, config=settings), keys.split()


def test_the_device_map_of_a_family_has_the_expected_keys(family):
    checkpoint, keys = family
    assert sorted(plan(checkpoint, {"cpu": "1GiB"}).device_map) == sorted(keys)


def test_the_units_of_a_family_are_in_execution_order(family):
    checkpoint, keys = family
    assert list(plan(checkpoint, {"cpu": "1GiB"}).devices[0].modules) == keys


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_the_plan_of_a_family_counts_right_on_several_devices(family, share):
    checkpoint, _ = family
    largest = max(unit.num_bytes for unit in cut_into_units(build_tree(checkpoint.tensors)))
    limits = {"cuda:0": int(checkpoint.total_bytes * share) + 2 * largest, "cuda:1": largest}
    made = plan(checkpoint, limits, overhead=0)
    counted = recount(made, checkpoint.tensors)
    assert counted == {use.device: use.weights_bytes for use in made.devices}
