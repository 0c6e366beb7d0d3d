"""Rotary embeddings: parameters of config.json as keys and tensors of GGUF, and tensors back as `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bigload.checkpoint.formats.gguf import gemma4
from bigload.checkpoint.formats.gguf.families import MAX_HEAD, Family
from bigload.checkpoint.formats.gguf.writing import refusal

_LLAMA3 = "rope_freqs.weight"
_LONGROPE = {f"rope_factors_{each}.weight": f"{each}_factor" for each in ("long", "short")}
"""Tensors of factors, and their keys in config.json."""

FACTOR_TENSORS = (_LLAMA3, *_LONGROPE)
_KEY = "original_max_position_embeddings"
_ORIGINAL_LENGTH = "rope.scaling.original_context_length"


def rope_parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the parameters of the rotary embedding: transformers 5 has another key for them than 4.

    Of Gemma 3, which has others for layers with a window, those of the other layers.
    """
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, dict):
            inner = found.get("full_attention")
            return inner if isinstance(inner, dict) else found
    return {}


def local_base(config: Mapping[str, object]) -> object:
    """Return the base of the rotary embedding in layers with a window; transformers 5 has another key than 4."""
    parameters = config.get("rope_parameters")
    inner = parameters.get("sliding_attention") if isinstance(parameters, dict) else None
    return inner.get("rope_theta") if isinstance(inner, dict) else config.get("rope_local_base_freq")


def base(config: Mapping[str, object], family: Family) -> object:
    """Return the base of the rotary embedding; Hunyuan's is stretched by `alpha`."""
    parameters = rope_parameters(config)
    found = parameters.get("rope_theta", config.get("rope_theta"))
    if not _is_stretched(parameters, family):
        return found
    size = max(head_size(config, family), 4)
    return _positive({"rope_theta": found}, "rope_theta") * _positive(parameters, "alpha") ** (size / (size - 2))


def _is_stretched(parameters: Mapping[str, object], family: Family) -> bool:
    """Return whether frequencies are those of transformers' `compute_ntk_alpha_rope_parameters`."""
    kind = parameters.get("rope_type", parameters.get("type"))
    return family.model_type.startswith("hunyuan") and kind == "dynamic" and bool(parameters.get("alpha"))


def head_size(config: Mapping[str, object], family: Family) -> int:
    """Return the size of a head; config.json need not say it."""
    names = [family.keys["embedding_length"], family.keys["attention.head_count"]]
    head_dim, hidden, heads = (config.get(key) for key in (family.keys.get("attention.key_length", "head_dim"), *names))
    if not (isinstance(head_dim, int) and head_dim > 0):
        if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
            raise refusal(f"a config.json with {names[0]} and {names[1]}")
        head_dim = hidden // heads
    if not 0 <= head_dim <= MAX_HEAD:
        raise refusal(f"heads of at most {MAX_HEAD} dimensions; config.json says {head_dim}")
    return head_dim


def rotated_size(config: Mapping[str, object], family: Family) -> int:
    """Return how many dimensions of a head are rotated."""
    stated = config.get("rotary_dim")  # of MiniMax
    if isinstance(stated, int) and stated > 0:
        return stated
    keys = ("partial_rotary_factor", "rotary_pct")
    share = rope_parameters(config).get(keys[0], next((config[key] for key in keys if key in config), 1))
    return int(head_size(config, family) * (share if isinstance(share, int | float) and 0 < share <= 1 else 1))


def scaling_keys(config: Mapping[str, object]) -> dict[str, str | int | float]:
    """Return the keys of a rotary embedding that is scaled, without their prefix."""
    scaling = rope_parameters(config)
    kind = scaling.get("rope_type", scaling.get("type"))
    if _is_long(scaling):
        original = _positive({_KEY: config.get(_KEY, scaling.get(_KEY))}, _KEY)
        factor = scaling.get("attention_factor")
        factor = float(factor) if isinstance(factor, int | float) else _attention_factor(config, original)
        return {"original_context_length": int(original), "attn_factor": factor}
    if kind not in ("linear", "yarn"):
        return {}
    found: dict[str, str | int | float] = {"type": str(kind), "factor": _positive(scaling, "factor")}
    if kind == "linear":
        return found
    share = scaling.get("mscale_all_dim")
    is_cut = config.get("model_type") != "gpt_oss"  # whose bounds llama.cpp rounds, and its converter lets it
    for key, expected in (("truncate", is_cut), ("attention_factor", None), ("mscale", share)):
        if scaling.get(key, expected) != expected:
            text = f"rotary embeddings of YaRN whose {key} is {expected!r}, as llama.cpp computes"
            raise refusal(f"{text}; it is {scaling[key]!r:.100}")
    found["original_context_length"] = int(_positive(scaling, "original_max_position_embeddings"))
    for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0)):
        found[f"yarn_{key}"] = _positive({key: scaling.get(key) or value}, key)
    if isinstance(share, int | float):
        found["yarn_log_multiplier"] = 0.1 * share  # as llama.cpp has it of DeepSeek
    return found


def _attention_factor(config: Mapping[str, object], original: float) -> float:
    """Return by what LongRoPE multiplies sines and cosines, where nothing else is said."""
    longest = config.get("max_position_embeddings")
    factor = longest / original if isinstance(longest, int) else 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0


def factor_tensors(config: Mapping[str, object], family: Family) -> dict[str, tuple[float, ...]]:
    """Return by what frequencies are divided, by the names of these tensors: Llama 3.1 and LongRoPE have some."""
    scaling = rope_parameters(config)
    if family.model_type == gemma4.MODEL_TYPE:
        return {_LLAMA3: gemma4.factors(config, scaling)}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", "linear", "yarn") or _is_stretched(scaling, family):
        return {}
    if _is_long(scaling) and _ORIGINAL_LENGTH in family.keys:
        size = rotated_size(config, family) // 2
        return {name: _factors(scaling, key, size) for name, key in _LONGROPE.items()}
    if kind != "llama3":
        raise refusal(f"a model with plain, linear, YaRN or llama3 rotary embeddings; this one has {kind!r:.100}")
    base = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(base, int | float) or base <= 0:
        raise refusal(f"a config.json with a rope_theta above 0; found {base!r:.100}")
    factor, low, high, length = (
        _positive(scaling, key)
        for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    if high <= low:
        raise refusal(f"rotary embeddings with a high_freq_factor above {low:g}, the low one; found {high:g}")
    return {_LLAMA3: llama3_factors(head_size(config, family), float(base), factor, (low, high), length)}


def _is_long(scaling: Mapping[str, object]) -> bool:
    return scaling.get("rope_type", scaling.get("type")) in ("longrope", "su")


def _factors(scaling: Mapping[str, object], key: str, size: int) -> tuple[float, ...]:
    found = scaling.get(key)
    numbers = tuple(each for each in found if isinstance(each, int | float)) if isinstance(found, list) else ()
    if len(numbers) != size or min(numbers, default=0) <= 0:
        raise refusal(f"rotary embeddings of LongRoPE whose {key} has {size} numbers above 0")
    return numbers


def _positive(scaling: Mapping[str, object], key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float) or not 0 < value < 2**63:
        raise refusal(f"rotary embeddings with a {key} above 0 and below 2^63; found {value!r:.100}")
    return float(value)


def llama3_factors(
    size: int, base: float, factor: float, bounds: tuple[float, float], length: float
) -> tuple[float, ...]:
    """Return by what Llama 3.1 divides each frequency of heads of this `size`.

    The rule is that of `_compute_llama3_parameters` in transformers 5, `modeling_rope_utils.py`.
    """
    (low, high), factors = bounds, []
    for each in range(0, size, 2):
        wavelength = 2 * math.pi * base ** (each / size)
        share = min(max((length / wavelength - low) / (high - low), 0), 1)
        factors.append(1 / ((1 - share) / factor + share))
    return tuple(factors)


def scaling_of(
    factors: Mapping[str, Sequence[float]], config: Mapping[str, object], attention_factor: float | None
) -> dict[str, object]:
    """Return what config.json says where a file has these tensors of factors, by name; empty if that is not known."""
    if factors.keys() == {_LLAMA3} and config.get("model_type") == gemma4.MODEL_TYPE:
        return gemma4.read_rope(config, tuple(factors[_LLAMA3]))
    if factors.keys() == {_LLAMA3}:
        found = _llama3_scaling(factors[_LLAMA3], config)
        return {"rope_scaling": found} if found else {}
    if factors.keys() == set(_LONGROPE):
        lists = {key: list(factors[name]) for name, key in _LONGROPE.items()}
        scaling = {"rope_type": "longrope", **lists, "attention_factor": attention_factor or 1.0}
        return {"rope_scaling": scaling}
    return {}


def _llama3_scaling(factors: Sequence[float], config: Mapping[str, object]) -> dict[str, object]:
    """Return `rope_scaling` of Llama 3.1 that gives these `factors`; empty if none does.

    Factors tell its bounds as shares of the original length, which no key says: that of Llama 3.1 is taken.
    """
    base, length, factor = config.get("rope_theta"), 8192, max(factors)
    if not isinstance(base, int | float) or base <= 0 or not 1 < factor < math.inf or min(factors) <= 0:
        return {}
    bounds = [(1.0, 4.0)]
    between = [number for number, each in enumerate(factors) if 1 < each < factor * (1 - 1e-6)]
    if len(between) > 1:  # a line through two of them
        ends = between[0], between[-1]
        x, y = (length * base ** (-each / len(factors)) / 2 / math.pi for each in ends)
        s, t = ((factor / factors[each] - 1) / (factor - 1) for each in ends)
        low = x - s * (x - y) / (s - t) if s != t else 0.0
        bounds.append((round(low, 4), round(low + (x - y) / (s - t), 4) if s != t else 0.0))
    for low, high in bounds:
        if 0 < low < high:
            expected = llama3_factors(2 * len(factors), base, factor, (low, high), length)
            if all(math.isclose(*pair, rel_tol=1e-4) for pair in zip(factors, expected, strict=True)):
                found = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
                return {"rope_type": "llama3", **found, "original_max_position_embeddings": length}
    return {}
