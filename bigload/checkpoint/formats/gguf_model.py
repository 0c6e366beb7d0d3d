"""Models in GGUF files as transformers knows them: names of tensors, and a config made of the metadata.

llama.cpp names tensors `blk.3.attn_q.weight` where transformers says `model.layers.3.self_attn.q_proj.weight`, and
keeps sizes as `llama.block_count` where config.json has `num_hidden_layers`. The tables follow llama.cpp's
`gguf-py/gguf/constants.py` and `tensor_mapping.py` (gguf 0.19) and the classes of transformers 5. An architecture
without a table keeps its names, and has no config.

Experts lie in one tensor; each is a byte range of it, and listed by itself here, as in files of transformers. Those of
gpt-oss stay in one, as there; gate and up are joined where values are decoded (`layouts/transforms/gguf_values.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from bigload.checkpoint.model import Shard, Span, TensorInfo

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERTS = ("gate", "up", "down")
MAX_EXPERTS = 4096

_ROOT = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {f"ffn_{each}": f"mlp.{each}_proj" for each in _EXPERTS}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SHARED_EXPERT = {
    **{f"ffn_{each}_shexp": f"mlp.shared_expert.{each}_proj" for each in _EXPERTS},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_QWEN_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A class of transformers for an architecture of llama.cpp.

    Attributes:
        model_type, architecture: Of its config.json.
        block: Modules of a block by their names in GGUF.
        experts: Name of an expert's module, with places for its number and `gate`, `up` or `down`; words for these.
        keys: Keys of config.json by those of the metadata, without the architecture's name.
        turns_heads: Rows of queries and keys are stored in the order in which llama.cpp rotates them.
        adds_one: Norms are stored with 1 added.
        fuses_experts: The class has gate and up of all experts in one tensor, [experts, inputs, outputs].
    """

    model_type: str
    architecture: str
    block: Mapping[str, str] = field(default_factory=lambda: {**_ATTENTION, **_MLP, **_NORMS})
    experts: str = "mlp.experts.{number}.{part}_proj"
    expert_parts: Mapping[str, str] = field(default_factory=lambda: {each: each for each in _EXPERTS})
    keys: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    turns_heads: bool = False
    adds_one: bool = False
    fuses_experts: bool = False


_LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", turns_heads=True)
_GEMMA = {**_ATTENTION, **_MLP, **_GEMMA_NORMS}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_MOE_GATE = {"ffn_gate_inp": "mlp.gate"}

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, model_type="mistral", architecture="MistralForCausalLM"),
    "mixtral": replace(
        _LLAMA,
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        block={**_ATTENTION, **_NORMS, "ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts.{number}.{part}",
        expert_parts={"gate": "w1", "up": "w3", "down": "w2"},
        keys={**_SIZES, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    "qwen2": Family(model_type="qwen2", architecture="Qwen2ForCausalLM"),
    "qwen3": Family(model_type="qwen3", architecture="Qwen3ForCausalLM"),
    "qwen2moe": Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        block={**_ATTENTION, **_NORMS, **_MOE_GATE, **_SHARED_EXPERT},
        keys={**_SIZES, **_QWEN_EXPERTS},
    ),
    "qwen3moe": Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        block={**_ATTENTION, **_NORMS, **_MOE_GATE, **_MLP},
        keys={**_SIZES, **_QWEN_EXPERTS},
    ),
    "gemma2": Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        block=_GEMMA,
        keys={**_SIZES, **_CAPS},
        adds_one=True,
    ),
    "gemma3": Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        block=_GEMMA,
        keys={**_SIZES, "rope.freq_base_swa": "rope_local_base_freq"},
        adds_one=True,
    ),
    "phi3": Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        block={
            **_NORMS,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        },
    ),
    "gpt-oss": Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        block={
            **_ATTENTION,
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
        },
        experts="mlp.experts",
        keys={
            **_SIZES,
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        fuses_experts=True,
    ),
}
"""By `general.architecture`; Mistral and Mixtral are written as `llama`, and told apart by name and experts."""


def family_of(shard: Shard) -> Family | None:
    """Return the class of transformers for the metadata of the first file; `None` where there is no table."""
    metadata = shard.metadata
    architecture = metadata.get("general.architecture", "")
    if architecture == "llama":
        if _number(metadata, "llama.expert_count"):
            architecture = "mixtral"
        elif "mistral" in metadata.get("general.name", "").lower():
            architecture = "mistral"
    return FAMILIES.get(architecture)


def config_of(shard: Shard, family: Family, tensors: Mapping[str, TensorInfo]) -> dict[str, object]:
    """Return what config.json would say, as far as the metadata of the first file and the `tensors` tell."""
    prefix = shard.metadata.get("general.architecture", "")
    found: dict[str, object] = {"architectures": [family.architecture], "model_type": family.model_type}
    for key, name in family.keys.items():
        value = _number(shard.metadata, f"{prefix}.{key}")
        if value is not None:
            found[name] = value
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is not None and embedding.shape:
        found["vocab_size"] = embedding.shape[0]
    if "num_key_value_heads" not in found and "num_attention_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        found[key] = _number(shard.metadata, f"tokenizer.ggml.{name}_token_id")
    if family.fuses_experts and shard.metadata.get(f"{prefix}.rope.scaling.type") == "yarn":
        length = _number(shard.metadata, f"{prefix}.rope.scaling.original_context_length")
        found["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": _number(shard.metadata, f"{prefix}.rope.scaling.factor"),
            "original_max_position_embeddings": length,
            "beta_fast": 32.0,  # this and the next are llama.cpp's where a file has none
            "beta_slow": 1.0,
            "truncate": False,
        }
    found["tie_word_embeddings"] = "lm_head.weight" not in tensors
    return found


def _number(metadata: Mapping[str, str], key: str) -> int | float | None:
    """Return a number of the metadata; of an array with one for each layer, the largest."""
    try:
        value = json.loads(metadata.get(key, "null"))
    except ValueError:
        return None
    numbers = value if isinstance(value, list) else [value]
    plain = [each for each in numbers if isinstance(each, int | float) and not isinstance(each, bool)]
    return max(plain) if plain and len(plain) == len(numbers) else None


def renamed(family: Family, tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Yield `tensors` under transformers' names, each expert by itself; those without one keep theirs."""
    for tensor in tensors:
        found = _BLOCK.fullmatch(tensor.name)
        if found is None:
            module, _, leaf = tensor.name.rpartition(".")
            yield replace(tensor, name=f"{_ROOT[module]}.{leaf}") if module in _ROOT else tensor
            continue
        layer, module, leaf = found.groups()
        part = module.removeprefix("ffn_").removesuffix("_exps")
        if family.fuses_experts and (module == "attn_sinks" or (module.endswith("_exps") and part in _EXPERTS)):
            # neither is a module of its own, so the leaf is no part of the name
            known = "self_attn.sinks" if module == "attn_sinks" else f"{family.experts}.{part}_proj"
            yield replace(tensor, name=f"model.layers.{layer}.{known}" + ("_bias" if leaf == "bias" else ""))
            continue
        is_stack = len(tensor.shape) == 3 and tensor.num_bytes and tensor.shape[0] <= MAX_EXPERTS
        if module == f"ffn_{part}_exps" and part in family.expert_parts and is_stack:
            for number in range(tensor.shape[0]):
                name = family.experts.format(number=number, part=family.expert_parts[part])
                yield _expert(tensor, f"model.layers.{layer}.{name}.{leaf}", number)
        elif module in family.block:
            name = f"model.layers.{layer}.{family.block[module]}.{leaf}"
            # llama.cpp keeps the gate of shared experts as a vector
            is_row = module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1
            yield replace(tensor, name=name, shape=(1, *tensor.shape) if is_row else tensor.shape)
        else:
            yield tensor


def _expert(tensor: TensorInfo, name: str, number: int) -> TensorInfo:
    span, num_bytes = tensor.span, tensor.num_bytes // tensor.shape[0]
    start = span.start + number * num_bytes
    return TensorInfo(name, tensor.dtype, tensor.shape[1:], Span(span.file, start, start + num_bytes))


def gguf_name(family: Family, name: str) -> str | None:
    """Return the name in GGUF of what transformers calls `name`, or of the tensor that it is an expert of."""
    module, _, leaf = name.rpartition(".")
    for stored, known in _ROOT.items():
        if module == known:
            return f"{stored}.{leaf}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    layer, module, leaf = found.groups()
    for stored, known in family.block.items():
        if module == known:
            return f"blk.{layer}.{stored}.{leaf}"
    before, _, after = family.experts.partition("{number}")
    for stored, part in family.expert_parts.items():
        if re.fullmatch(rf"{re.escape(before)}\d+{re.escape(after.format(part=part))}", module):
            return f"blk.{layer}.ffn_{stored}_exps.{leaf}"
    return None
