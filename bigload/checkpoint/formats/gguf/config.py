"""config.json of a GGUF file, made of its metadata: the inverse of `metadata.py`.

llama.cpp keeps sizes as `llama.block_count` where config.json has `num_hidden_layers`; `families.py` has the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bigload.checkpoint.formats.gguf import gemma4
from bigload.checkpoint.formats.gguf.families import FAMILIES, LLAMA4_EXPERTS_WITHOUT_NORM, Family, GgufRule
from bigload.checkpoint.formats.gguf.header import metadata_number, metadata_value
from bigload.checkpoint.model import Shard, TensorInfo

MAX_LAYERS = 4096
_BIASES_OF_UMT5 = frozenset(
    {"enc.blk.1.attn_rel_b.weight", "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"}
)
"""T5 has positional biases in the first block only."""


def family_of(shard: Shard, names: Iterable[str]) -> Family | None:
    """Return the class of transformers for the metadata of the first file; `None` where there is no table.

    The `names` of tensors, llama.cpp's or those of transformers, tell UMT5 from T5.
    """
    metadata = shard.metadata
    architecture = metadata.get("general.architecture", "")
    found = [family for family in FAMILIES.values() if family.architecture == architecture]
    model_type = found[0].model_type if found else ""
    if architecture == "llama":
        if metadata_number(metadata, "llama.expert_count"):
            model_type = "mixtral"
        elif "mistral" in metadata.get("general.name", "").lower():
            model_type = "mistral"
    elif architecture == "deepseek2" and metadata_number(metadata, "deepseek2.expert_gating_func") != 2:  # softmax
        model_type = "deepseek_v2"
    elif architecture == "olmo2" and metadata_number(metadata, "olmo2.attention.sliding_window"):
        model_type = "olmo3"
    elif architecture == "granitemoe" and metadata_number(metadata, "granitemoe.expert_shared_feed_forward_length"):
        model_type = "granitemoeshared"
    elif architecture == "mamba" and metadata_number(metadata, "mamba.ssm.dt_b_c_rms"):
        model_type = "falcon_mamba"
    elif architecture == "t5" and not _BIASES_OF_UMT5.isdisjoint(names):
        model_type = "umt5"
    return FAMILIES.get(model_type)


def config_of(shard: Shard, family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    """Return what config.json would say, as far as the metadata of the first file and the `tensors` tell."""
    metadata, prefix = shard.metadata, family.architecture
    found: dict[str, object] = {"architectures": [family.model_class], "model_type": family.model_type}
    for key, name in family.keys.items():
        value = metadata_number(metadata, f"{prefix}.{key}")
        if value is not None:
            found[name] = value
    found |= {**family.builtin, **family.defaults}
    if GgufRule.LATENT_HEADS in family.rules.values():
        found |= _latent_sizes(metadata, prefix, found)
    found |= {key: True for key, ending in family.flags.items() if any(name.endswith(ending) for name in tensors)}
    found |= _of_model_type(metadata, family, found, tensors)
    embedding = tensors.get(f"{family.root['token_embd']}.weight")
    if embedding is not None and embedding.shape:
        found["vocab_size"] = embedding.shape[0]
    if "num_key_value_heads" not in found and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        found[key] = metadata_number(metadata, f"tokenizer.ggml.{name}_token_id")
    found |= _rope(metadata, prefix, found)
    found["tie_word_embeddings"] = f"{family.root['output']}.weight" not in tensors
    return found


def _of_model_type(
    metadata: Mapping[str, str], family: Family, config: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Return what one model type has besides others, where `config` says what all have."""
    kind, count = family.model_type, config.get("num_hidden_layers")
    found: dict[str, object] = {}
    head_dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if kind in ("gemma2", "gemma3_text") and isinstance(hidden, int) and isinstance(heads, int):
        is_27b = count in (46, 62)  # for which llama.cpp has another one
        found["query_pre_attn_scalar"] = hidden // max(heads, 1) if is_27b else head_dim
    by_layer = metadata_value(metadata, f"{family.architecture}.attention.head_count_kv")
    if kind in ("lfm2", "lfm2_moe") and isinstance(by_layer, list):
        found["layer_types"] = ["full_attention" if each else "conv" for each in by_layer]
    if family.encoder_decoder:
        is_gated = any(name.endswith(".wi_1.weight") for name in tensors)
        found |= {"is_encoder_decoder": True, "feed_forward_proj": "gated-gelu" if is_gated else "relu"}
    if kind == gemma4.MODEL_TYPE:
        found |= gemma4.read_config(metadata, config, tensors)
    if kind == "llama4_text":
        found["use_qk_norm"] = config.get("num_local_experts") != LLAMA4_EXPERTS_WITHOUT_NORM
    after = config.get("num_nextn_predict_layers")
    if isinstance(count, int) and isinstance(after, int):
        found["num_hidden_layers"] = count - after
    if family.builtin.get("sliding_window", True) is None and isinstance(count, int) and count < MAX_LAYERS:
        found["layer_types"] = ["full_attention"] * count
    return found


def _latent_sizes(metadata: Mapping[str, str], prefix: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the sizes of heads whose keys and values are made of a latent vector: GGUF has one head for all."""
    key, value, rotated = (
        metadata_number(metadata, f"{prefix}.{each}")
        for each in ("attention.key_length_mla", "attention.value_length_mla", "rope.dimension_count")
    )
    if key is None:  # of older files, which have whole heads
        key, value = (metadata_number(metadata, f"{prefix}.attention.{each}_length") for each in ("key", "value"))
    return {
        "num_key_value_heads": config.get("num_attention_heads"),
        "qk_nope_head_dim": None if key is None or rotated is None else key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "q_lora_rank": config.get("q_lora_rank"),
    }


def _rope(metadata: Mapping[str, str], prefix: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return what config.json says of the rotary embedding, besides its base."""
    found: dict[str, object] = {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        head_dim = hidden // heads
    rotated = metadata_number(metadata, f"{prefix}.rope.dimension_count")
    is_whole = "qk_rope_head_dim" in config
    if not is_whole and rotated and isinstance(head_dim, int) and 0 < rotated < head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind, factor = (metadata_value(metadata, f"{prefix}.rope.scaling.{key}") for key in ("type", "factor"))
    kind = metadata.get(f"{prefix}.rope.scaling.type")
    if kind == "linear":
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
    elif kind == "yarn":
        scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
        length = metadata_number(metadata, f"{prefix}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
        for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0)):  # llama.cpp's where a file has none
            scaling[key] = metadata_number(metadata, f"{prefix}.rope.scaling.yarn_{key}") or value
        share = metadata_number(metadata, f"{prefix}.rope.scaling.yarn_log_multiplier")
        if share:
            scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * share, 6)  # stored as float32
        if config.get("model_type") == "gpt_oss":
            scaling["truncate"] = False
        found["rope_scaling"] = scaling
    return found


def attention_factor(shard: Shard) -> float | None:
    """Return by what sines and cosines of the rotary embedding are multiplied, if the file says it."""
    return metadata_number(shard.metadata, f"{shard.metadata.get('general.architecture')}.rope.scaling.attn_factor")
