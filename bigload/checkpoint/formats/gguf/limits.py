"""Limits of llama.cpp: models that it cannot load, or would compute otherwise than transformers, are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bigload.checkpoint.formats.gguf.config import MAX_LAYERS
from bigload.checkpoint.formats.gguf.families import LLAMA4_EXPERTS_WITHOUT_NORM, Family
from bigload.checkpoint.formats.gguf.rope import head_size
from bigload.checkpoint.formats.gguf.writing import MetadataValue, refusal

_WINDOWS = frozenset({"sliding_attention", "chunked_attention"})


@dataclass(frozen=True, slots=True)
class SizeRule:
    """A rule that sizes of a model follow, or llama.cpp does not load it.

    Attributes:
        expected: What the model has, in words.
        keys: Keys of the metadata, without the architecture's name.
        holds: Whether such values follow the rule.
    """

    expected: str
    keys: tuple[str, ...]
    holds: Callable[..., bool]


_QUERIES, _KEYS, _HEAD = "attention.head_count", "attention.head_count_kv", "attention.key_length"
_SQUARE = SizeRule(
    "heads that are as wide together as the hidden state",
    (_QUERIES, _HEAD, "embedding_length"),
    lambda heads, size, hidden: heads * size == hidden,
)
_EVERY_KEY = SizeRule("as many keys as queries", (_QUERIES, _KEYS), lambda queries, keys: queries == keys)
_ROTATED = SizeRule(
    "heads that are rotated whole", (_HEAD, "rope.dimension_count"), lambda size, rotated: size == rotated
)
_DOUBLED = SizeRule(
    "an inner size of twice the hidden one",
    ("ssm.inner_size", "embedding_length"),
    lambda inner, hidden: inner == 2 * hidden,
)
_RULES: Mapping[str, tuple[SizeRule, ...]] = {
    **dict.fromkeys(("llama", "qwen3", "qwen3moe"), (_ROTATED,)),
    **dict.fromkeys(("phi3", "stablelm"), (_SQUARE,)),
    **dict.fromkeys(("olmo2", "qwen2", "qwen2moe", "starcoder2"), (_SQUARE, _ROTATED)),
    "dots1": (_EVERY_KEY, _ROTATED),
    "olmoe": (_SQUARE, _EVERY_KEY, _ROTATED),
    "mamba": (_DOUBLED,),
}
"""By architecture. They are shapes of tensors and assertions of a graph in a file of llama.cpp's `src/models/`; that of
`n_rot` for Llama is in `load_hparams` of `src/llama-model.cpp`."""

_EVERY: tuple[SizeRule, ...] = (
    SizeRule(
        "no more experts for a token than there are",
        ("expert_count", "expert_used_count"),
        lambda count, used: count >= used,
    ),
    SizeRule(
        "groups of two experts or more, of which a token takes some but not all",
        ("expert_count", "expert_group_count", "expert_group_used_count"),
        lambda count, groups, used: groups <= 1 or (count % groups == 0 and count >= 2 * groups and 0 < used < groups),
    ),
)
"""Assertions in `load_hparams` of `src/llama-model.cpp`, and the two best of each group in `build_moe_ffn`."""


def check_sizes(metadata: Mapping[str, MetadataValue], family: Family) -> None:
    """Refuse sizes with which llama.cpp loads no model."""
    for rule in (*_RULES.get(family.architecture, ()), *_EVERY):
        values = {key: metadata.get(f"{family.architecture}.{key}") for key in rule.keys}
        known = [value for value in values.values() if isinstance(value, int)]
        if len(known) == len(values) and not rule.holds(*known):
            listed = ", ".join(f"{key} {value}" for key, value in values.items())
            raise refusal(f"a {family.model_type} with {rule.expected}, as llama.cpp loads it; its sizes are {listed}")


def check_computation(config: Mapping[str, object], family: Family) -> None:
    """Refuse a model that llama.cpp would compute otherwise, because GGUF has no key for what its config says."""
    model_type = family.model_type
    for key, expected in family.builtin.items():
        found = config.get(key, expected)
        if found != expected:
            raise refusal(f"a {model_type} whose {key} is {expected!r}, as llama.cpp computes; it is {found!r:.100}")
    for key in ("hidden_activation", "hidden_act", "activation_function"):
        found = config.get(key)
        if isinstance(found, str) and found not in family.activations:
            known = " or ".join(family.activations)
            raise refusal(f"a {model_type} whose {key} is {known}, as llama.cpp computes; it is {found!r:.100}")
    kinds = config.get("layer_types")
    if family.window_every and isinstance(kinds, list) and not _WINDOWS.isdisjoint(kinds):
        for number, kind in enumerate(kinds):
            if (kind in _WINDOWS) != (number % family.window_every < family.window_every - 1):
                expected = f"layers with a window but every {family.window_every}th, as llama.cpp computes"
                raise refusal(f"a {model_type} of {expected}; layer {number} is {kind!r:.100}")
    if model_type == "llama4_text":
        _check_llama4(config)
    elif model_type in ("gemma2", "gemma3_text"):
        _check_gemma(config, family)


def _check_gemma(config: Mapping[str, object], family: Family) -> None:
    scale = config.get("query_pre_attn_scalar")
    is_27b = config.get("num_hidden_layers") in (46, 62)  # which llama.cpp knows by this
    size = head_size({**config, "head_dim": None} if is_27b else config, family)
    if isinstance(scale, int | float) and scale != size:
        text = f"a {family.model_type} whose query_pre_attn_scalar is {size}, as llama.cpp computes; it is {scale:g}"
        raise refusal(text)


def _check_llama4(config: Mapping[str, object]) -> None:
    count, step, experts = (
        value if isinstance(value := config.get(key), int) else 0
        for key in ("num_hidden_layers", "interleave_moe_layer_step", "num_local_experts")
    )
    if count > MAX_LAYERS:
        raise refusal(f"a llama4_text of at most {MAX_LAYERS} layers; config.json says {count!r:.100}")
    followed: Mapping[str, object] = {
        "use_qk_norm": experts != LLAMA4_EXPERTS_WITHOUT_NORM,
        "moe_layers": list(range(step - 1, count, max(step, 1))),
        "no_rope_layers": [int((number + 1) % 4 != 0) for number in range(count)],
    }
    for key, expected in followed.items():
        if config.get(key, expected) != expected:
            text = f"a llama4_text whose {key} is {expected!r:.100}, as llama.cpp computes"
            raise refusal(f"{text}; it is {config[key]!r:.100}")
