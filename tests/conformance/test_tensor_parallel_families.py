"""`reshard --tp` and `parallelize` divide every model family of the table alike."""

import json

import model_types
import pytest
import torch

from bigload.parallel.tensor_parallel.apply import plan_tensor_parallel
from bigload.planning.tensor_parallel.division import WHOLE, Division, chunks
from bigload.planning.tensor_parallel.families import FAMILIES
from bigload.planning.tensor_parallel.partition import partition
from builders import checkpoint_of

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default")]

WIDTHS = {
    **{"hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 16, "word_embed_proj_dim": 32},
    **{"intermediate_size": 64, "ffn_dim": 64, "d_ff": 64, "hidden_dim": 64, "n_inner": 64},
    **{"encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32, "shared_intermediate_size": 32},
    **{"num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_heads": 4},
    **{"num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8, "rotary_dim": 4},
    **{"num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2},
    **{"vocab_size": 96, "max_position_embeddings": 64, "n_positions": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_k": 2, "n_shared_experts": 1, "moe_num_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1},
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"image_size": 16, "patch_size": 4, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
}


LATENT = {"num_key_value_heads": 4, "head_dim": 4}
OTHERS = {
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1e9, "rope_theta": 1e4}},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "esm": {"token_dropout": False, "mask_token_id": 3, "position_embedding_type": "absolute"},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "wav2vec2": {
        **{"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2},
        **{"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
    },
}
"""What the configs of these families need besides or instead."""


def small(default, names, model_type):
    """Return arguments of a small config, and of its sections, where `default` has such."""
    sections = {
        name: {**small(section, section, section.get("model_type")), "model_type": section.get("model_type")}
        for name, section in default.items()
        if name in ("text_config", "vision_config") and section
    }
    return {**{name: WIDTHS[name] for name in names if name in WIDTHS}, **OTHERS.get(model_type, {}), **sections}


def built(model_type):
    """Return a small model of the family, without memory."""
    model_types.need(transformers, model_type)
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    default = kind()
    raw = default.to_dict()
    config = kind(**small(raw, {*raw, *getattr(default, "attribute_map", {})}, model_type))
    with torch.device("meta"):
        try:
            model = transformers.AutoModelForCausalLM.from_config(config)
        except ValueError:
            model = transformers.AutoModel.from_config(config)
    return model.eval()


def is_whole(division, shape):
    return division == WHOLE or all(pairs == ((0, shape[division.dim]),) for pairs in division.ranges)


_UNPROVEN = "images and text that fit each other are no input that is known, so family rules are not validated"
EXCEPTIONS = {
    **dict.fromkeys(("gemma3", "llava", "llava_next"), ("vision_tower.", _UNPROVEN)),
    "qwen3_vl": ("language_model.", f"{_UNPROVEN}; the model has no plan of its own"),
    "dbrx": ("ffn.experts.", "its experts are dealt out among ranks, which needs another router"),
    "phi3": ("self_attn.qkv_proj.", "its forward takes the number of heads from the config, so outputs are gathered"),
}
"""By model type: names of parameters that a model does not divide as a checkpoint, and why. All others agree."""
RELEASE = model_types.release(transformers)
if RELEASE < (5, 22):
    _EMBEDDING = ("language_model.embed_tokens.", "the model's own plan leaves the embedding whole")
    EXCEPTIONS |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _EMBEDDING)

LOOK_ALIKES = {"internlm": "llama", "kimi_k2": "deepseek_v3", "RefinedWeb": "falcon", "RefinedWebModel": "falcon"}
"""Families that transformers does not have, and one whose names they have."""

BY_NAME = {
    "baichuan": {"self_attn.W_pack": (0, 3), "self_attn.o_proj": (1, 1), "mlp.gate_proj": (0, 1)},
    "internlm2": {"attention.wqkv": (0, 1), "attention.wo": (1, 1), "feed_forward.w2": (1, 1)},
    "siglip_text_model": {"self_attn.v_proj": (0, 1), "self_attn.out_proj": (1, 1), "mlp.fc1": (0, 1)},
    "mllama_text_model": {"cross_attn.k_proj": (0, 1), "cross_attn.o_proj": (1, 1), "mlp.down_proj": (1, 1)},
    "mllama_vision_model": {"self_attn.q_proj": (0, 1), "self_attn.o_proj": (1, 1), "mlp.fc2": (1, 1)},
    "vit": {"attention.attention.query": (0, 1), "attention.output.dense": (1, 1), "output.dense": (1, 1)},
}
"""Families with no model, or none of these names: by module the divided dimension, and the parts stored as one."""


def divided(model, model_type):
    """Return how `reshard --tp 2` divides the parameters of `model` as one of `model_type`."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "model_type": model_type}
    divisions = partition(
        checkpoint_of({name: ("F32", shapes[name]) for name in shapes}, config=config), tp=2
    ).divisions
    return {name: WHOLE if is_whole(division, shapes[name]) else division for name, division in divisions.items()}


@pytest.fixture(autouse=True)
def _quiet():
    transformers.logging.set_verbosity_error()


def test_every_family_of_the_table_is_checked():
    known = set(transformers.models.auto.configuration_auto.CONFIG_MAPPING)
    later = {name for name, since in model_types.SINCE.items() if since > RELEASE}
    assert {*LOOK_ALIKES, *BY_NAME, *later} >= FAMILIES.keys() - known


@pytest.mark.parametrize("model_type", sorted(FAMILIES.keys() - LOOK_ALIKES.keys() - BY_NAME.keys()))
def test_models_are_divided_as_their_checkpoints(model_type):
    """What rules divide is divided alike; what they leave whole may be divided in a model: tables, gathered layers."""
    model = built(model_type)
    by_rules = divided(model, model.config.model_type)
    plan = plan_tensor_parallel(model, 2)
    part, _ = EXCEPTIONS.get(model_type, (None, None))
    others = {name for name, division in by_rules.items() if division not in (WHOLE, plan.division(name))}
    assert {name for name in others if part is None or part not in name} == set()
    assert bool(others) == (part is not None), "an exception that is none"
    assert any(by_rules[name] == plan.division(name) != WHOLE for name in by_rules) or model_type == "qwen3_vl"
    if plan.source != "family":
        assert any(note.code == "unproven" for note in plan.notes)
    for name, division in by_rules.items():
        if division == WHOLE != plan.division(name):
            assert plan.division(name) == Division(0, chunks(plan.shapes[name][0], 2)), name


@pytest.mark.parametrize(("model_type", "other"), LOOK_ALIKES.items())
def test_families_without_a_model_are_divided_as_those_they_are_named_after(model_type, other):
    model = built(other)
    assert divided(model, model_type) == divided(model, other)


@pytest.mark.parametrize("model_type", BY_NAME)
def test_families_of_other_names_are_divided_by_names_and_shapes(model_type):
    config = {"model_type": model_type, "hidden_size": 16, "num_attention_heads": 4, "attention_heads": 4}
    names = {f"layers.0.{name}.weight": form for name, form in BY_NAME[model_type].items()}
    fused = {"attention.wqkv", "self_attn.W_pack"}
    shapes = {name: (48 if name[9:-7] in fused else 16, 16) for name in names}
    found = partition(checkpoint_of({name: ("F32", shapes[name]) for name in names}, config=config), tp=2).divisions
    for name, (dim, num_parts) in names.items():
        assert found[name].dim == dim
        assert [len(ranges) for ranges in found[name].ranges] == [num_parts, num_parts], name
        assert found[name].length(0) == found[name].length(1) == shapes[name][dim] // 2
