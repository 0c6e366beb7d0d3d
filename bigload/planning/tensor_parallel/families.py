"""Table of tensor-parallel rules of the known model families, in the names of their checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bigload.planning.model.config import ModelConfig
from bigload.planning.tensor_parallel.rules import Rule


def _layer(attention: str, out: str = "o_proj") -> dict[str, str]:
    """Return the rules of an attention that stores queries, keys and values apart, as most do."""
    projections = {f"{attention}.{name}_proj": "colwise" for name in "qkv"}
    return {**projections, f"{attention}.{out}": "rowwise"}


def _gated(parent: str) -> dict[str, str]:
    return {f"{parent}.gate_proj": "colwise", f"{parent}.up_proj": "colwise", f"{parent}.down_proj": "rowwise"}


_HEAD = {"lm_head": "colwise_gather_output"}
_VOCABULARY = {"embed_tokens": "embedding_rowwise", "wte": "embedding_rowwise", **_HEAD}
_ATTENTION = _layer("self_attn")
_LLAMA = {**_ATTENTION, **_gated("mlp"), **_VOCABULARY}
_UNGATED = {**_ATTENTION, "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise", **_VOCABULARY}
_FC = {"fc1": "colwise", "fc2": "rowwise"}
_EXPERTS = {
    **_gated("experts.*"),
    "experts.gate_up_proj": "packed_colwise",
    "experts.down_proj": "rowwise",
    "experts": "moe_tp_experts",
}
_MOE = {**_LLAMA, **_EXPERTS, **_gated("shared_expert"), **_gated("shared_experts")}
_MIXTRAL = {
    **_ATTENTION,
    **_EXPERTS,
    "experts.*.w1": "colwise",
    "experts.*.w3": "colwise",
    "experts.*.w2": "rowwise",
    **_VOCABULARY,
}
_LATENT = {
    "self_attn.q_proj": "colwise",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_DEEPSEEK = {**_LATENT, **{key: style for key, style in _MOE.items() if not key.startswith("self_attn")}}
_GLM = {
    **_ATTENTION,
    "mlp.gate_up_proj": "packed_colwise",
    "mlp.down_proj": "rowwise",
    **_VOCABULARY,
}
_PHI3 = {**_GLM, "self_attn.qkv_proj": "packed_qkv"}
_WIDE = {"mlp.dense_h_to_4h": "colwise", "mlp.dense_4h_to_h": "rowwise"}
_BLOOM = {
    "self_attention.query_key_value": "grouped_qkv",
    "self_attention.dense": "rowwise",
    **_WIDE,
    "word_embeddings": "embedding_rowwise",
    **_HEAD,
}
_BERT = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "attention.output.dense": "rowwise",
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
}
_BART = {
    **_layer("self_attn", "out_proj"),
    **_layer("encoder_attn", "out_proj"),
    **_FC,
    **_HEAD,
    "proj_out": "colwise_gather_output",
}
_T5 = {
    **{
        f"{attention}.{name}": "rowwise" if name == "o" else "colwise"
        for attention in ("SelfAttention", "EncDecAttention")
        for name in "qkvo"
    },
    "SelfAttention.relative_attention_bias": "embedding_colwise",
    "DenseReluDense.wi": "colwise",
    "DenseReluDense.wi_0": "colwise",
    "DenseReluDense.wi_1": "colwise",
    "DenseReluDense.wo": "rowwise",
    **_HEAD,
}
_CLIP = {**_layer("self_attn", "out_proj"), "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}


_TYPES: tuple[tuple[str, Mapping[str, str]], ...] = (
    (
        "cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3 gemma3_text granite helium hyperclovax internlm "
        "internlm3 iquestcoder llama llava llava_next ministral ministral3 mistral mistral3 olmo olmo2 olmo3 "
        "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3 qwen3_vl qwen3_vl_text seed_oss smollm3 "
        "stablelm vaultgemma",
        _LLAMA,
    ),
    (
        "dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe minimax_m2 olmoe qwen2_moe qwen3_5_moe qwen3_5_moe_text "
        "qwen3_5 qwen3_5_text qwen3_moe qwen3_next",
        _MOE,
    ),
    ("mixtral minimax phimoe", _MIXTRAL),
    ("deepseek_v2 deepseek_v3 kimi_k2", _DEEPSEEK),
    ("apertus arcee jais2 nemotron", _UNGATED),
    ("glm glm4", _GLM),
    ("phi3", _PHI3),
    ("phi", {**_layer("self_attn", "dense"), "mlp.fc1": "colwise", "mlp.fc2": "rowwise", **_VOCABULARY}),
    ("starcoder2", {**_ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise", **_VOCABULARY}),
    ("mllama mllama_text_model", {**_LLAMA, **_layer("cross_attn")}),
    ("mllama_vision_model", {**_ATTENTION, "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}),
    (
        "granitemoe",
        {**_ATTENTION, **_EXPERTS, "input_linear": "packed_colwise", "output_linear": "rowwise", **_VOCABULARY},
    ),
    (
        "gpt_oss",
        {
            **_ATTENTION,
            "self_attn.sinks": "colwise",
            "mlp.experts.*": "grouped_gemm",
            "mlp.experts": "moe_ep_experts",
            **_VOCABULARY,
        },
    ),
    (
        "dbrx",
        {
            "attn.Wqkv": "packed_qkv",
            "attn.out_proj": "rowwise",
            **{f"ffn.experts.mlp.{name}": "grouped_gemm" for name in ("w1", "v1", "w2")},
            **_VOCABULARY,
        },
    ),
    (
        "gpt2",
        {
            "attn.c_attn": "conv1d_packed_qkv",
            "attn.c_proj": "conv1d_rowwise",
            "mlp.c_fc": "conv1d_colwise",
            "mlp.c_proj": "conv1d_rowwise",
            **_VOCABULARY,
        },
    ),
    (
        "gpt_neo",
        {**_layer("attn.attention", "out_proj"), "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise", **_VOCABULARY},
    ),
    (
        "gpt_neox",
        {
            "attention.query_key_value": "grouped_qkv",
            "attention.dense": "rowwise",
            **_WIDE,
            "embed_out": "colwise_gather_output",
            **_HEAD,
        },
    ),
    ("gptj", {**_layer("attn", "out_proj"), "mlp.fc_in": "colwise", "mlp.fc_out": "rowwise", **_VOCABULARY}),
    ("bloom falcon RefinedWeb RefinedWebModel", _BLOOM),
    (
        "mpt",
        {
            "attn.Wqkv": "packed_qkv",
            "attn.out_proj": "rowwise",
            "ffn.up_proj": "colwise",
            "ffn.down_proj": "rowwise",
            "wte": "embedding_rowwise",
        },
    ),
    (
        "internlm2",
        {
            "attention.wqkv": "grouped_qkv",
            "attention.wo": "rowwise",
            "feed_forward.w1": "colwise",
            "feed_forward.w3": "colwise",
            "feed_forward.w2": "rowwise",
            "output": "colwise_gather_output",
        },
    ),
    ("baichuan", {**_LLAMA, "self_attn.W_pack": "packed_qkv"}),
    ("opt", {**_layer("self_attn", "out_proj"), **_FC, **_VOCABULARY}),
    ("bart mbart whisper", _BART),
    ("t5 mt5 umt5", _T5),
    ("bert roberta xlm-roberta camembert electra esm", _BERT),
    (
        "vit",
        {**{key.replace(".self.", ".attention."): style for key, style in _BERT.items()}},
    ),
    (
        "albert",
        {
            "attention.query": "colwise",
            "attention.key": "colwise",
            "attention.value": "colwise",
            "attention.dense": "rowwise",
            "ffn": "colwise",
            "ffn_output": "rowwise",
        },
    ),
    (
        "distilbert",
        {
            **{f"attention.{name}_lin": "colwise" for name in "qkv"},
            "attention.out_lin": "rowwise",
            "ffn.lin1": "colwise",
            "ffn.lin2": "rowwise",
        },
    ),
    ("clip clip_text_model clip_vision_model siglip siglip_text_model siglip_vision_model", _CLIP),
    (
        "wav2vec2",
        {
            **_layer("attention", "out_proj"),
            "feed_forward.intermediate_dense": "colwise",
            "feed_forward.output_dense": "rowwise",
            **_HEAD,
        },
    ),
)

FAMILIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {model_type: rules for types, rules in _TYPES for model_type in types.split()}
)
"""Styles by pattern of each known `model_type`, in the names that its checkpoints have on disk."""

_FALCONS = ("falcon", "RefinedWeb", "RefinedWebModel")


def family_rules(config: ModelConfig) -> tuple[Rule, ...] | None:
    """Return the rules of the innermost `model_type` that is known, `None` where none is."""
    for model_type in config.model_types:
        if model_type in FAMILIES:
            styles = dict(FAMILIES[model_type])
            if model_type in _FALCONS and not has_groups(config) and config.flag("multi_query") is not False:
                styles["self_attention.query_key_value"] = "packed_qkv"
            return tuple(Rule(pattern, style) for pattern, style in styles.items())
    return None


def num_kv_heads(config: ModelConfig, num_heads: int) -> int:
    """Return how many heads keys and values have, given those of queries, which they share where nothing is said.

    A falcon of the new architecture keeps `multi_query` and does not mean it; one of the old has a single key and value
    unless it says otherwise (the default of its config class).
    """
    if any(model_type in _FALCONS for model_type in config.model_types):
        if has_groups(config):
            return config.number("num_kv_heads") or num_heads
        return num_heads if config.flag("multi_query") is False else 1
    return 1 if config.flag("multi_query") else config.number("num_kv_heads") or num_heads


def has_groups(config: ModelConfig) -> bool:
    """Return whether a falcon stores its queries by groups, as 40B and 180B do; the oldest configs have no flag."""
    return bool(config.flag("new_decoder_architecture")) or (
        config.flag("new_decoder_architecture") is None and bool(config.number("n_head_kv"))
    )
