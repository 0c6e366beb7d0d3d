"""Tiny random models of transformers by model type, made from the configuration of the type alone, with their inputs.

Sizes are set by the names that configurations have for them, in nested configurations as well.
"""

import inspect

import torch

VOCABULARY = 96
WIDTHS = """
    hidden_size d_model n_embd embed_dim emb_dim embedding_size word_embed_proj_dim width input_hidden_size lru_width
    decoder_hidden_size encoder_hidden_size projection_dim projection_size encoder_hidden_dim attention_hidden_size
    cross_attention_hidden_size rescale_dim
"""
INNER_WIDTHS = """
    intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_inner hidden_dim dim_ff
    shared_expert_intermediate_size expert_ffn_hidden_size
"""
DEPTHS = """
    num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers depth num_encoder_layers
    num_decoder_layers encoder_num_layers layers
"""
HEADS = """
    num_attention_heads n_head n_heads num_heads encoder_attention_heads heads decoder_attention_heads
    num_encoder_attention_heads num_decoder_attention_heads
"""
SIZES = {
    **dict.fromkeys(WIDTHS.split(), 32),
    **dict.fromkeys(INNER_WIDTHS.split(), 64),
    **dict.fromkeys(DEPTHS.split(), 2),
    **dict.fromkeys(HEADS.split(), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "kv_channels", "state_size", "v_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "kv_lora_rank", "attention_head_dim", "mamba_d_state", "mamba_d_head"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "time_step_rank", "expert_dim"), 16),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "entity_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions"), 64),
    **dict.fromkeys(("max_seq_len", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token"), 2),
    "image_size": 16,
    "patch_size": 8,
    "num_mel_bins": 8,
}
LATENT = {"num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
LINEAR |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
OVERRIDES = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "esm": {"mask_token_id": 3, "pad_token_id": 0, "position_embedding_type": "rotary"},
    "falcon": {"head_dim": None, "new_decoder_architecture": True},
    "glm4_moe_lite": LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "prophetnet": {"num_hidden_layers": None},
    "qwen2_vl_text": ROPE,
    "qwen2_5_vl_text": ROPE,
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": [2, 32], "axial_pos_embds_dim": [16, 16]},
    "zaya": {"num_experts_per_tok": 1},
    "xlnet": {"max_position_embeddings": None},
}
"""What names of sizes do not tell: arguments of a configuration by model type; `None` is the default one."""


def configuration(transformers, model_type):
    """Return a tiny configuration of the type."""
    return transformers.CONFIG_MAPPING[model_type](**arguments(transformers.CONFIG_MAPPING[model_type], model_type))


def arguments(kind, model_type):
    default = kind()
    known = {name: size for name, size in SIZES.items() if isinstance(getattr(default, name, None), int)}
    for name, value in vars(default).items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            known[name] = VOCABULARY - 1 - len(known) % 20
        if name.endswith("_token_id") and isinstance(value, list):
            known[name] = [2]
    nested = {
        name: arguments(each, getattr(each, "model_type", ""))
        for name, each in kind.sub_configs.items()
        if getattr(default, name, None) is not None and getattr(each, "model_type", None)
    }
    found = {**known, **nested, **OVERRIDES.get(model_type, {})}
    return {name: value for name, value in found.items() if value is not None}


def class_of(transformers, model_type):
    """Return the class of the type that people load: for text if there is one, else the base."""
    from transformers.models.auto import modeling_auto

    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_MAPPING_NAMES,
    ):
        name = mapping.get(model_type)
        if name is not None:
            return getattr(transformers, name if isinstance(name, str) else name[0])
    raise KeyError(model_type)


def inputs_of(model):
    """Return what the model takes, on the CPU."""
    torch.manual_seed(1)
    ids = torch.arange(3, 11).reshape(1, 8)
    config, main = model.config, model.main_input_name
    if main == "pixel_values":
        inner = getattr(config, "vision_config", config)
        size = getattr(inner, "image_size", 16)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return {main: torch.randn(1, getattr(inner, "num_channels", 3), height, width)}
    if main in ("input_values", "input_features"):
        bins = getattr(config, "num_mel_bins", None)
        inputs = {main: torch.randn(1, 1600) if main == "input_values" else torch.randn(1, bins or 8, 128)}
    else:
        inputs = {"input_ids": ids}
    named = inspect.signature(model.forward).parameters
    if "attention_mask" in named and main == "input_ids":
        inputs["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in named:
        inputs["decoder_input_ids"] = ids[:, :5]
    return inputs


def answers(model):
    """Return all floating-point tensors that the model answers with, in order."""
    torch.manual_seed(2)
    with torch.no_grad():
        return list(_tensors(model(**inputs_of(model))))


def _tensors(value):
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value.clone()
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
