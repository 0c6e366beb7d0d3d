"""Metadata of a GGUF file, made of a model's config.json: the inverse of `config.py`."""

from __future__ import annotations

from collections.abc import Mapping

from bigload.checkpoint.formats.gguf import gemma4
from bigload.checkpoint.formats.gguf.families import Family, GgufRule
from bigload.checkpoint.formats.gguf.rope import base, head_size, local_base, rotated_size, scaling_keys
from bigload.checkpoint.formats.gguf.writing import MetadataValue, refusal

_FLOATS = ("_epsilon", "rope.freq_base", "rope.freq_base_swa", "softcapping", "clamp_kqv", "_scale", ".scale")
_FLAGS = ("use_parallel_residual", "expert_weights_norm")


def metadata_of(
    name: str, config: Mapping[str, object], family: Family, file_type: int, num_predictions: int
) -> dict[str, MetadataValue]:
    """Return the keys that llama.cpp's converter writes for a model of this `name`, but those of its tokenizer.

    `num_predictions` are written layers of multi-token prediction.
    """
    architecture = family.architecture
    if family.model_type == "mistral" and "mistral" not in name.lower():
        name = f"Mistral {name}"  # the name tells readers Mistral from Llama
    found: dict[str, MetadataValue] = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name.encode(errors="replace").decode(),
        "general.file_type": file_type,
        "general.quantization_version": 2,
    }
    values = _values(config, family, num_predictions)
    for key, known in family.keys.items():
        value = values.get(known)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # one for each layer, all alike
        if isinstance(value, bool) and key in _FLAGS:
            found[f"{architecture}.{key}"] = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not -(2**63) <= value < 2**63:
                raise refusal(f"a config.json whose {known} is a number of 64 bits; it is {value!r:.100}")
            found[f"{architecture}.{key}"] = float(value) if key.endswith(_FLOATS) else int(value)
    sizes = _head_sizes(config, family) if "attention.head_count" in family.keys else {}
    found |= {f"{architecture}.{key}": value for key, value in sizes.items()}
    found |= {f"{architecture}.{key}": value for key, value in family.fixed.items()}
    found |= {f"{architecture}.{key}": value for key, value in _of_model_type(config, family.model_type).items()}
    found |= {f"{architecture}.rope.scaling.{key}": value for key, value in scaling_keys(config).items()}
    for key, known in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        value = config.get(known)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32:
            found[f"tokenizer.ggml.{key}_token_id"] = value
    return found


def _of_model_type(config: Mapping[str, object], model_type: str) -> dict[str, MetadataValue]:
    """Return the keys that one model type has, or has otherwise than others."""
    found: dict[str, MetadataValue] = {}
    kinds, count = config.get("layer_types"), config.get("num_key_value_heads")
    if model_type in ("lfm2", "lfm2_moe") and isinstance(kinds, list) and isinstance(count, int):
        found["attention.head_count_kv"] = [count if kind == "full_attention" else 0 for kind in kinds]
    if model_type == "lfm2":
        found["feed_forward_length"] = _adjusted_length(config)
    return {**found, **gemma4.written_keys(config)} if model_type == gemma4.MODEL_TYPE else found


def _values(config: Mapping[str, object], family: Family, num_predictions: int) -> dict[str, object]:
    """Return `config` with values that versions of transformers name otherwise under one key."""
    experts = config.get("num_experts", config.get("num_local_experts"))  # versions of transformers name it differently
    values = {
        **config,
        "num_experts": experts,
        "num_local_experts": experts,
        "rope_theta": base(config, family),
        "rope_local_base_freq": local_base(config),
    }
    shared = config.get("moe_num_shared_experts"), config.get("moe_intermediate_size")
    if isinstance(shared[0], int) and isinstance(shared[1], int):  # of ERNIE
        values["shared_expert_intermediate_size"] = shared[0] * shared[1]
    count = config.get("num_hidden_layers")
    if num_predictions and isinstance(count, int):
        values |= {"num_hidden_layers": count + num_predictions, "num_nextn_predict_layers": num_predictions}
    else:
        values.pop("num_nextn_predict_layers", None)
    if config.get("use_sliding_window") is False:
        values.pop("sliding_window", None)
    return values


def _adjusted_length(config: Mapping[str, object]) -> int:
    """Return the inner size of LFM2's feed-forward layers: two thirds, times a factor, rounded up."""
    names = ("block_ff_dim", "intermediate_size", "block_ffn_dim_multiplier", "block_multiple_of")
    stated, usual, factor, step = (value if isinstance(value := config.get(each), int | float) else 0 for each in names)
    length = stated or usual
    if config.get("block_auto_adjust_ff_dim", True) is not True:
        return int(length)
    length = int((factor or 1) * int(2 * length / 3))
    return int(step or 1) * -(-length // int(step or 1))


def _head_sizes(config: Mapping[str, object], family: Family) -> dict[str, int]:
    """Return the keys that follow from several of config.json."""
    found: dict[str, int] = {}
    if config.get(family.keys.get("feed_forward_length", "")) is None:
        hidden = config.get(family.keys["embedding_length"])
        found["feed_forward_length"] = 4 * hidden if isinstance(hidden, int) else 0
    if config.get(family.keys["context_length"]) is None:
        found["context_length"] = 2048
    if config.get("multi_query") is True:
        found["attention.head_count_kv"] = 1
    if GgufRule.LATENT_HEADS in family.rules.values():
        sizes = [config.get(each) for each in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")]
        latent, rotated, plain, value = (each if isinstance(each, int) else 0 for each in sizes)
        return {
            **found,
            "attention.head_count_kv": 1,
            "attention.key_length": latent + rotated,
            "attention.value_length": latent,
            "attention.key_length_mla": plain + rotated,
            "attention.value_length_mla": value,
            "rope.dimension_count": rotated,
        }
    head_dim = head_size(config, family)
    return {
        **found,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": rotated_size(config, family),
    }
