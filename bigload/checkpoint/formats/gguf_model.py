"""Models in GGUF files as transformers knows them: names of tensors, and a config made of the metadata.

llama.cpp names tensors `blk.3.attn_q.weight` where transformers says `model.layers.3.self_attn.q_proj.weight`, and
keeps sizes as `llama.block_count` where config.json has `num_hidden_layers`. `gguf_families.py` has the names. An
architecture that is not there keeps its names, and has no config.

Experts lie in one tensor; each is a byte range of it, and listed by itself here, as in files of transformers. Where a
class has one tensor for several of GGUF, each is a parameter of its module (`mlp.experts.ffn_up_exps_weight`); they are
joined where values are decoded (`layouts/transforms/gguf_values.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from bigload.checkpoint.formats.gguf_families import FAMILIES, Family, GgufRule
from bigload.checkpoint.model import Shard, Span, TensorInfo

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
MAX_EXPERTS = 4096
MAX_LAYERS = 4096


def family_of(shard: Shard) -> Family | None:
    """Return the class of transformers for the metadata of the first file; `None` where there is no table."""
    metadata = shard.metadata
    architecture = metadata.get("general.architecture", "")
    found = [family for family in FAMILIES.values() if family.architecture == architecture]
    model_type = found[0].model_type if found else ""
    if architecture == "llama":
        if _number(metadata, "llama.expert_count"):
            model_type = "mixtral"
        elif "mistral" in metadata.get("general.name", "").lower():
            model_type = "mistral"
    elif architecture == "deepseek2" and _number(metadata, "deepseek2.expert_gating_func") != 2:  # softmax
        model_type = "deepseek_v2"
    return FAMILIES.get(model_type)


def config_of(shard: Shard, family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    """Return what config.json would say, as far as the metadata of the first file and the `tensors` tell."""
    metadata, prefix = shard.metadata, family.architecture
    found: dict[str, object] = {"architectures": [family.model_class], "model_type": family.model_type}
    for key, name in family.keys.items():
        value = _number(metadata, f"{prefix}.{key}")
        if value is not None:
            found[name] = value
    found |= {**family.builtin, **family.defaults}
    if GgufRule.LATENT_HEADS in family.rules.values():
        found |= _latent_sizes(metadata, prefix, found)
    found |= {key: True for key, ending in family.flags.items() if any(name.endswith(ending) for name in tensors)}
    head_dim, hidden, heads = (found.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if family.model_type in ("gemma2", "gemma3_text") and isinstance(hidden, int) and isinstance(heads, int):
        is_27b = found.get("num_hidden_layers") in (46, 62)  # for which llama.cpp has another one
        found["query_pre_attn_scalar"] = hidden // max(heads, 1) if is_27b else head_dim
    by_layer = _json(metadata, f"{prefix}.attention.head_count_kv")
    if family.model_type == "lfm2" and isinstance(by_layer, list):
        found["layer_types"] = ["full_attention" if count else "conv" for count in by_layer]
    num_layers = found.get("num_hidden_layers")
    if family.builtin.get("sliding_window", True) is None and isinstance(num_layers, int) and num_layers < MAX_LAYERS:
        found["layer_types"] = ["full_attention"] * num_layers
    embedding = tensors.get(f"{family.root['token_embd']}.weight")
    if embedding is not None and embedding.shape:
        found["vocab_size"] = embedding.shape[0]
    if "num_key_value_heads" not in found and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        found[key] = _number(metadata, f"tokenizer.ggml.{name}_token_id")
    found |= _rope(metadata, prefix, found)
    found["tie_word_embeddings"] = f"{family.root['output']}.weight" not in tensors
    return found


def _latent_sizes(metadata: Mapping[str, str], prefix: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return the sizes of heads whose keys and values are made of a latent vector: GGUF has one head for all."""
    key, value, rotated = (
        _number(metadata, f"{prefix}.{each}")
        for each in ("attention.key_length_mla", "attention.value_length_mla", "rope.dimension_count")
    )
    if key is None:  # of older files, which have whole heads
        key, value = (_number(metadata, f"{prefix}.attention.{each}_length") for each in ("key", "value"))
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
    rotated = _number(metadata, f"{prefix}.rope.dimension_count")
    is_whole = "qk_rope_head_dim" in config
    if not is_whole and rotated and isinstance(head_dim, int) and 0 < rotated < head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind, factor = (_json(metadata, f"{prefix}.rope.scaling.{key}") for key in ("type", "factor"))
    kind = metadata.get(f"{prefix}.rope.scaling.type")
    if kind == "linear":
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
    elif kind == "yarn":
        scaling: dict[str, object] = {"rope_type": kind, "factor": factor}
        length = _number(metadata, f"{prefix}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
        for key, value in (("beta_fast", 32.0), ("beta_slow", 1.0)):  # llama.cpp's where a file has none
            scaling[key] = _number(metadata, f"{prefix}.rope.scaling.yarn_{key}") or value
        share = _number(metadata, f"{prefix}.rope.scaling.yarn_log_multiplier")
        if share:
            scaling["mscale"] = scaling["mscale_all_dim"] = round(10 * share, 6)  # stored as float32
        if config.get("model_type") == "gpt_oss":
            scaling["truncate"] = False
        found["rope_scaling"] = scaling
    return found


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


def llama3_scaling(factors: Sequence[float], config: Mapping[str, object]) -> dict[str, object]:
    """Return `rope_scaling` of Llama 3.1 that gives these `factors`; empty if none does.

    They tell its bounds as shares of the original length, which no key says: that of Llama 3.1 is taken.
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


def _json(metadata: Mapping[str, str], key: str) -> object:
    try:
        return json.loads(metadata.get(key, "null"))
    except ValueError:
        return None


def _number(metadata: Mapping[str, str], key: str) -> int | float | None:
    """Return a number or truth value of the metadata; of an array with one for each layer, the largest."""
    value = _json(metadata, key)
    numbers = value if isinstance(value, list) else [value]
    plain = [each for each in numbers if isinstance(each, int | float)]
    return max(plain) if plain and len(plain) == len(numbers) else None


def renamed(family: Family, tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield `tensors` under transformers' names, each expert by itself; those without one keep theirs."""
    known = list(family.block.values())
    shared = {each for each in known if known.count(each) > 1}
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        if found is None:
            module, _, leaf = tensor.name.rpartition(".")
            yield replace(tensor, name=f"{family.root[module]}.{leaf}") if module in family.root else tensor
            continue
        layer, stored = found.groups()
        before = f"{family.layers}.{layer}."
        module, _, leaf = stored.rpartition(".")
        part = module.removeprefix("ffn_").removesuffix("_exps")
        name = family.block.get(stored) or (
            f"{family.block[module]}.{leaf}" if module in family.block and leaf in ("weight", "bias") else None
        )
        is_stack = len(tensor.shape) == 3 and tensor.num_bytes and tensor.shape[0] <= MAX_EXPERTS
        if name is not None:
            if name in shared:
                name = _part_name(name, stored)
            shape = tensor.shape
            if module == "ffn_gate_inp_shexp" and len(shape) == 1:  # llama.cpp keeps it as a vector
                shape = (1, *shape)
            elif family.rules.get(name) is GgufRule.SQUEEZED and len(shape) == 2:
                shape = (shape[0], 1, shape[1])
            yield replace(tensor, name=before + name, shape=shape)
        elif module == f"ffn_{part}_exps" and part in family.expert_parts and is_stack:
            for number in range(tensor.shape[0]):
                name = family.experts.format(number=number, part=family.expert_parts[part])
                yield _expert(tensor, f"{before}{name}.{leaf}", number)
        else:
            yield tensor


def _part_name(name: str, stored: str) -> str:
    """Return a name for a part of what transformers calls `name`: another parameter of the same module."""
    return f"{name.rpartition('.')[0]}.{stored.replace('.', '_')}"


def _expert(tensor: TensorInfo, name: str, number: int) -> TensorInfo:
    span, num_bytes = tensor.span, tensor.num_bytes // tensor.shape[0]
    start = span.start + number * num_bytes
    return TensorInfo(name, tensor.dtype, tensor.shape[1:], Span(span.file, start, start + num_bytes))


def gguf_names(family: Family, name: str) -> tuple[str, ...]:
    """Return the name in GGUF of what transformers calls `name`, or of its stack of experts; several if it is cut."""
    module, _, leaf = name.rpartition(".")
    for stored, known in family.root.items():
        if module == known:
            return (f"{stored}.{leaf}",)
    found = re.fullmatch(rf"{re.escape(family.layers)}\.(\d+)\.(.+)", name)
    if found is None:
        return ()
    layer, rest = found.groups()
    module, _, leaf = rest.rpartition(".")
    several = [stored for stored, known in family.block.items() if known == rest]
    if not several and leaf in ("weight", "bias"):
        several = [f"{stored}.{leaf}" for stored, known in family.block.items() if known == module]
        before, _, after = family.experts.partition("{number}")
        several += [
            f"ffn_{stored}_exps.{leaf}"
            for stored, part in family.expert_parts.items()
            if re.fullmatch(rf"{re.escape(before)}\d+{re.escape(after.format(part=part))}", module)
        ]
    return tuple(f"blk.{layer}.{stored}" for stored in several)


def rule_of(family: Family, name: str) -> GgufRule | None:
    """Return what happens to the values of what transformers calls `name`."""
    found = re.fullmatch(rf"{re.escape(family.layers)}\.\d+\.(.+)", name)
    if found is None:
        return None
    return family.rules.get(found[1]) or family.rules.get(found[1].rpartition(".")[0])


def joined(family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the `tensors` of a file, as `renamed` names them, by the name that transformers has for all of each.

    Raises:
        ValueError: some of those that are one are missing, or differ in form.
    """
    known = list(family.block.values())
    shared = {f".{_part_name(each, stored)}": each for stored, each in family.block.items() if known.count(each) > 1}
    found: dict[str, dict[int, TensorInfo]] = {}
    needed: dict[str, int] = {}
    for name, tensor in tensors.items():
        number, ending = next((pair for pair in enumerate(shared) if name.endswith(pair[1])), (0, ""))
        whole = f"{name.removesuffix(ending)}.{shared[ending]}" if ending else name
        found.setdefault(whole, {})[number] = tensor
        needed[whole] = known.count(shared[ending]) if ending else 1
    for name, parts in found.items():
        if len(parts) < needed[name] or len({(part.dtype, len(part.shape)) for part in parts.values()}) > 1:
            listed = " and ".join(part.name for part in parts.values())
            raise ValueError(f"{name} needs {needed[name]} tensors of one form, found {listed}")
    return {name: [parts[number] for number in sorted(parts)] for name, parts in found.items()}
