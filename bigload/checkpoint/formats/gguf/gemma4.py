"""Parts of Gemma 4 that other models have not: heads of other sizes and numbers in layers without a window.

Its config.json has these by layer (`per_layer_config`) or once (`global_head_dim`); llama.cpp has them under the keys
without `_swa`. Their rotary embeddings leave most dimensions as they are: factors divide these frequencies by 1e30.
"""

from __future__ import annotations

from collections.abc import Mapping

from bigload.checkpoint.formats.gguf.families import MAX_HEAD
from bigload.checkpoint.formats.gguf.header import metadata_number, metadata_value
from bigload.checkpoint.formats.gguf.writing import MetadataValue, refusal
from bigload.checkpoint.model import TensorInfo

MODEL_TYPE = "gemma4_text"
_STILL = 1e30
_WINDOW, _FULL = "sliding_attention", "full_attention"
_SHARE = 0.25
"""Of the dimensions, rotated in layers without a window, where config.json does not say it."""


def written_keys(config: Mapping[str, object]) -> dict[str, MetadataValue]:
    """Return the keys, without the architecture, that other models do not have, or have otherwise."""
    windows, (size, full_heads) = _windows(config), full_layers(config)
    local = _whole(config, "head_dim")
    heads, inner, shared = (_whole(config, each) for each in ("num_key_value_heads", "intermediate_size", _SHARED))
    found: dict[str, MetadataValue] = {
        "attention.sliding_window_pattern": windows,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "rope.dimension_count_swa": local,
        "embedding_length_per_layer_input": _whole(config, "hidden_size_per_layer_input"),
    }
    if full_heads != heads:
        found["attention.head_count_kv"] = [heads if is_local else full_heads for is_local in windows]
    if config.get("use_double_wide_mlp") is True:
        first = len(windows) - shared
        found["feed_forward_length"] = [inner if number < first else 2 * inner for number in range(len(windows))]
    return found


_SHARED = "num_kv_shared_layers"


def full_layers(config: Mapping[str, object]) -> tuple[int, int]:
    """Return the size of a head, and the number of keys, in layers without a window."""
    layers = [str(number) for number, is_local in enumerate(_windows(config)) if not is_local]
    stated = config.get("per_layer_config")
    if not isinstance(stated, dict):
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") is True else None
        sizes = {"head_dim": config.get("global_head_dim", 512), "num_key_value_heads": heads}
        stated = dict.fromkeys(layers, sizes)
    several = [stated.get(each) for each in layers]
    first = several[0] if several else None
    alike = all(each == first for each in several) and len(stated) <= len(layers)
    if not alike or not isinstance(first, dict | None) or (first or {}).keys() - {"head_dim", "num_key_value_heads"}:
        raise refusal(
            f"a {MODEL_TYPE} whose per_layer_config has the same sizes of heads for all layers without a window"
        )
    values = {**config, **{key: value for key, value in (first or {}).items() if value is not None}}
    if not 0 < _whole(values, "head_dim") <= MAX_HEAD:
        raise refusal(f"heads of at most {MAX_HEAD} dimensions; config.json says {values.get('head_dim')!r:.100}")
    return _whole(values, "head_dim"), _whole(values, "num_key_value_heads")


def factors(config: Mapping[str, object], scaling: Mapping[str, object]) -> tuple[float, ...]:
    """Return by what frequencies are divided in layers without a window; `scaling` are their parameters."""
    share = scaling.get("partial_rotary_factor", 1.0)
    if not isinstance(share, int | float) or not 0 < share <= 1 or scaling.get("factor", 1.0) != 1:
        raise refusal(f"a {MODEL_TYPE} whose rotary embeddings rotate a share of the dimensions, and have no factor")
    half = full_layers(config)[0] // 2
    return tuple(1.0 if number < int(share * half) else _STILL for number in range(half))


def read_config(
    metadata: Mapping[str, str], config: Mapping[str, object], tensors: Mapping[str, TensorInfo]
) -> dict[str, object]:
    """Return what config.json says besides what all models have."""
    windows, heads, inner = (
        value if isinstance(value := metadata_value(metadata, f"gemma4.{key}"), list) else []
        for key in ("attention.sliding_window_pattern", "attention.head_count_kv", "feed_forward_length")
    )
    size, local = (metadata_number(metadata, f"gemma4.attention.key_length{each}") for each in ("", "_swa"))
    found: dict[str, object] = {
        "head_dim": local,
        "layer_types": [_WINDOW if each else _FULL for each in windows],
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "partial_rotary_factor": _SHARE,
                "rope_theta": config.get("rope_theta"),
            },
            _WINDOW: {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq")},
        },
    }
    layer: dict[str, object] = {"head_dim": size}
    if heads:
        layer["num_key_value_heads"] = next(
            (each for each, local in zip(heads, windows, strict=False) if not local), None
        )
        found["num_key_value_heads"] = next((each for each, local in zip(heads, windows, strict=False) if local), None)
    if inner:
        found |= {"intermediate_size": min(inner), "use_double_wide_mlp": max(inner) > min(inner)}
    full = [number for number, is_local in enumerate(windows) if not is_local]
    found["per_layer_config"] = {str(number): layer for number in full}
    keys, values = (
        {number for number in full if f"model.layers.{number}.self_attn.{each}_proj.weight" in tensors} for each in "kv"
    )
    found["attention_k_eq_v"] = bool(keys - values)
    embedding = tensors.get("model.embed_tokens_per_layer.weight")
    if embedding is not None and embedding.shape:
        found["vocab_size_per_layer_input"] = embedding.shape[0]
    return found


def read_rope(config: Mapping[str, object], values: tuple[float, ...]) -> dict[str, object]:
    """Return what config.json says where frequencies are divided by these; empty if these are no factors of Gemma 4."""
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict) or not isinstance(parameters.get(_FULL), dict):
        return {}
    if sorted(values) != list(values) or not set(values) <= {1.0, values[-1]} or values[-1] not in (1.0, _STILL):
        return {}
    share = values.count(1.0) / len(values)
    return {"rope_parameters": {**parameters, _FULL: {**parameters[_FULL], "partial_rotary_factor": share}}}


def _windows(config: Mapping[str, object]) -> list[bool]:
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != config.get("num_hidden_layers"):
        raise refusal(f"a {MODEL_TYPE} whose config.json has layer_types for all layers")
    return [kind == _WINDOW for kind in kinds]


def _whole(config: Mapping[str, object], key: str) -> int:
    value = config.get(key)
    return value if isinstance(value, int) else 0
