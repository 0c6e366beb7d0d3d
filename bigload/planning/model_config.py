"""Values of a model's config.json, which may hold anything: what is not of the right kind counts as not said."""

from __future__ import annotations

from collections.abc import Mapping

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
MAX_NUMBER = 2**31
"""Layers and experts of real models stay far below; a config beyond it is not about a model."""


def text_config(config: Mapping[str, object] | None) -> Mapping[str, object]:
    """Return the part of `config` that describes the language model: a nested one, or all of it.

    Omni models nest twice, `thinker_config.text_config`.
    """
    if config is None:
        return {}
    thinker = config.get("thinker_config")
    outer = thinker if isinstance(thinker, Mapping) else config
    return next((inner for key in _TEXT_CONFIGS if isinstance(inner := outer.get(key), Mapping)), outer)


def count_of(config: Mapping[str, object] | None, *keys: str) -> int | None:
    """Return the whole number of at least 1 under the first of `keys` that has one.

    The language model's own config is asked before the outer one. `True`, `8.0`, `"8"` and `[8]` are no counts.
    """
    if config is None:
        return None
    for source in (text_config(config), config):
        for key in keys:
            value = source.get(key)
            if type(value) is int and 1 <= value <= MAX_NUMBER:
                return value
    return None
