"""Text model within a multimodal one, whose config.json has that of the text model in a section."""

from __future__ import annotations

from collections.abc import Mapping

from bigload.checkpoint.formats.gguf.families import FAMILIES

_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
"""Keys that may be outside of the section."""

_PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
}


def text_config(config: Mapping[str, object]) -> dict[str, object] | None:
    """Return the config of the text model in a multimodal one; `None` if it is none, or its text model has no table."""
    inner = config.get("text_config")
    if config.get("model_type") in FAMILIES or not isinstance(inner, dict) or inner.get("model_type") not in FAMILIES:
        return None
    shared = {key: config[key] for key in _SHARED if key in config}
    outer = {"quantization_config": config.get("quantization_config")}
    return {**outer, **shared, **inner}


def text_name(name: str) -> str | None:
    """Return the name that the text model by itself has for a tensor; `None` for one of another part."""
    return next((own + name.removeprefix(each) for each, own in _PREFIXES.items() if name.startswith(each)), None)
