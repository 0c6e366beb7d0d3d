"""Table of tensor-parallel rules of the known model families, in the names of their checkpoints on disk."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bigload.planning.model.config import ModelConfig
from bigload.planning.tensor_parallel.rules import Rule


def _rules(*given: Mapping[str, str], **names: str) -> dict[str, str]:
    """Return styles by pattern: those of `given` tables, then for each style the patterns in its text."""
    styles = {pattern: style for style, patterns in names.items() for pattern in patterns.split()}
    return {pattern: style for table in (*given, styles) for pattern, style in table.items()}


def _attention(module: str, out: str = "o_proj") -> dict[str, str]:
    """Return the rules of an attention that stores queries, keys and values apart, as most do."""
    return _rules(colwise=" ".join(f"{module}.{name}_proj" for name in "qkv"), rowwise=f"{module}.{out}")


def _gated(parent: str) -> dict[str, str]:
    return _rules(colwise=f"{parent}.gate_proj {parent}.up_proj", rowwise=f"{parent}.down_proj")


def _mlp(first: str, second: str) -> dict[str, str]:
    return _rules(colwise=first, rowwise=second)


_HEAD = _rules(colwise_gather_output="lm_head")
_VOCABULARY = _rules(_HEAD, embedding_rowwise="embed_tokens wte")
_SELF = _attention("self_attn")
_LLAMA = _rules(_SELF, _gated("mlp"), _VOCABULARY)
_UNGATED = _rules(_SELF, _mlp("mlp.up_proj", "mlp.down_proj"), _VOCABULARY)
_FC = _mlp("fc1", "fc2")
_MLP_FC = _mlp("mlp.fc1", "mlp.fc2")
_EXPERTS = _rules(
    _gated("experts.*"),
    packed_colwise="experts.gate_up_proj",
    rowwise="experts.down_proj",
    moe_tp_experts="experts",
)
_MOE = _rules(_LLAMA, _EXPERTS, _gated("shared_expert"), _gated("shared_experts"))
_MIXTRAL = _rules(_SELF, _EXPERTS, _mlp("experts.*.w1 experts.*.w3", "experts.*.w2"), _VOCABULARY)
_LATENT = _rules(
    colwise="self_attn.q_proj self_attn.q_b_proj self_attn.kv_b_proj",
    rowwise="self_attn.o_proj",
)
_DEEPSEEK = _rules(_LATENT, {key: style for key, style in _MOE.items() if not key.startswith("self_attn")})
_GLM = _rules(_SELF, _VOCABULARY, packed_colwise="mlp.gate_up_proj", rowwise="mlp.down_proj")
_PHI3 = _rules(_GLM, packed_qkv="self_attn.qkv_proj")
_WIDE = _mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_BLOOM = _rules(
    _WIDE,
    _HEAD,
    grouped_qkv="self_attention.query_key_value",
    rowwise="self_attention.dense",
    embedding_rowwise="word_embeddings",
)
_BERT = _rules(
    colwise="attention.self.query attention.self.key attention.self.value intermediate.dense",
    rowwise="attention.output.dense output.dense",
)
_BART = _rules(
    _attention("self_attn", "out_proj"),
    _attention("encoder_attn", "out_proj"),
    _FC,
    _HEAD,
    colwise_gather_output="proj_out",
)
_T5 = _rules(
    _HEAD,
    colwise="SelfAttention.q SelfAttention.k SelfAttention.v EncDecAttention.q EncDecAttention.k EncDecAttention.v "
    "DenseReluDense.wi DenseReluDense.wi_0 DenseReluDense.wi_1",
    rowwise="SelfAttention.o EncDecAttention.o DenseReluDense.wo",
    embedding_colwise="SelfAttention.relative_attention_bias",
)


_TYPES: Mapping[str, Mapping[str, str]] = {
    "cohere cohere2 cwm ernie4_5 exaone4 gemma gemma2 gemma3 gemma3_text granite helium hyperclovax internlm "
    "internlm3 iquestcoder llama llava llava_next ministral ministral3 mistral mistral3 olmo olmo2 olmo3 "
    "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text qwen3 qwen3_vl qwen3_vl_text seed_oss smollm3 "
    "stablelm vaultgemma": _LLAMA,
    "dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe minimax_m2 olmoe qwen2_moe qwen3_5_moe qwen3_5_moe_text "
    "qwen3_5 qwen3_5_text qwen3_moe qwen3_next": _MOE,
    "mixtral minimax phimoe": _MIXTRAL,
    "deepseek_v2 deepseek_v3 kimi_k2": _DEEPSEEK,
    "apertus arcee jais2 nemotron": _UNGATED,
    "glm glm4": _GLM,
    "phi3": _PHI3,
    "phi": _rules(_attention("self_attn", "dense"), _MLP_FC, _VOCABULARY),
    "starcoder2": _rules(_SELF, _mlp("mlp.c_fc", "mlp.c_proj"), _VOCABULARY),
    "mllama mllama_text_model": _rules(_LLAMA, _attention("cross_attn")),
    "mllama_vision_model": _rules(_SELF, _MLP_FC),
    "granitemoe": _rules(_SELF, _EXPERTS, _VOCABULARY, packed_colwise="input_linear", rowwise="output_linear"),
    "gpt_oss": _rules(
        _SELF,
        _VOCABULARY,
        colwise="self_attn.sinks",
        grouped_gemm="mlp.experts.*",
        moe_ep_experts="mlp.experts",
    ),
    "dbrx": _rules(
        _VOCABULARY,
        packed_qkv="attn.Wqkv",
        rowwise="attn.out_proj",
        grouped_gemm="ffn.experts.mlp.w1 ffn.experts.mlp.v1 ffn.experts.mlp.w2",
    ),
    "gpt2": _rules(
        _VOCABULARY,
        conv1d_packed_qkv="attn.c_attn",
        conv1d_rowwise="attn.c_proj mlp.c_proj",
        conv1d_colwise="mlp.c_fc",
    ),
    "gpt_neo": _rules(_attention("attn.attention", "out_proj"), _mlp("mlp.c_fc", "mlp.c_proj"), _VOCABULARY),
    "gpt_neox": _rules(
        _WIDE,
        _HEAD,
        grouped_qkv="attention.query_key_value",
        rowwise="attention.dense",
        colwise_gather_output="embed_out",
    ),
    "gptj": _rules(_attention("attn", "out_proj"), _mlp("mlp.fc_in", "mlp.fc_out"), _VOCABULARY),
    "bloom falcon RefinedWeb RefinedWebModel": _BLOOM,
    "mpt": _rules(
        _mlp("ffn.up_proj", "ffn.down_proj"),
        packed_qkv="attn.Wqkv",
        rowwise="attn.out_proj",
        embedding_rowwise="wte",
    ),
    "internlm2": _rules(
        _mlp("feed_forward.w1 feed_forward.w3", "feed_forward.w2"),
        grouped_qkv="attention.wqkv",
        rowwise="attention.wo",
        colwise_gather_output="output",
    ),
    "baichuan": _rules(_LLAMA, packed_qkv="self_attn.W_pack"),
    "opt": _rules(_attention("self_attn", "out_proj"), _FC, _VOCABULARY),
    "bart mbart whisper": _BART,
    "t5 mt5 umt5": _T5,
    "bert roberta xlm-roberta camembert electra esm": _BERT,
    "vit": {key.replace(".self.", ".attention."): style for key, style in _BERT.items()},
    "albert": _rules(
        colwise="attention.query attention.key attention.value ffn",
        rowwise="attention.dense ffn_output",
    ),
    "distilbert": _rules(
        colwise="attention.q_lin attention.k_lin attention.v_lin ffn.lin1",
        rowwise="attention.out_lin ffn.lin2",
    ),
    "clip clip_text_model clip_vision_model siglip siglip_text_model siglip_vision_model": _rules(
        _attention("self_attn", "out_proj"), _MLP_FC
    ),
    "wav2vec2": _rules(
        _attention("attention", "out_proj"),
        _mlp("feed_forward.intermediate_dense", "feed_forward.output_dense"),
        _HEAD,
    ),
}

FAMILIES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {model_type: rules for types, rules in _TYPES.items() for model_type in types.split()}
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
