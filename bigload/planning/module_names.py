"""Names of modules in a checkpoint, and their names in the model that transformers builds in memory.

A device map is looked up by the names of the model. Since transformers 5 these are often not the names of the file:
vision towers and text models have moved below `model`, experts are fused, and a checkpoint that was saved from a base
model lacks the name under which a model with a head holds it. The table below says how, per model type. It was read
off transformers 5.23 and is held against the models that it builds (tests/conformance/test_names.py); a type that is
not in it is answered with an error, not with a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bigload.checkpoint.model import TensorInfo
from bigload.errors import NamesUnknownError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renaming:
    """In-memory names of the keys of a device map, in the order of the keys.

    Keys that no module in memory answers to are left out, and a note says so. Several keys can have one name: modules
    that transformers fuses into one, which then need one device. `added` are modules that hold no tensor of the
    checkpoint but buffers that transformers computes, each with the key whose device it should share: without a
    place in the map they stay in RAM.
    """

    keys: Mapping[str, str]
    added: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def in_memory_names(
    device_map_keys: Sequence[str], tensors: Mapping[str, TensorInfo], config: Mapping[str, object] | None
) -> Renaming:
    """Return what transformers calls the modules and parameters that a checkpoint calls `device_map_keys`.

    Raises:
        NamesUnknownError: the table does not know the model, or the config does not say which one it is.
    """
    model = _Model.of(config)
    base = f"{model.family.base}." if model.family.base else ""
    # A checkpoint of the bare base model has the prefix nowhere; one of a model with a head has it almost everywhere.
    is_saved_bare = bool(base) and not any(model.family.rename(name).startswith(base) for name in tensors)
    keys: dict[str, str] = {}
    unbuilt = []
    for key in device_map_keys:
        name = model.family.rename(key)
        if model.leaves_out(name):
            unbuilt.append(key)
        elif model.is_bare:
            keys[key] = f"{name}.".removeprefix(base).rstrip(".")
        elif is_saved_bare and name.partition(".")[0] not in _HEADS:
            keys[key] = f"{base}{name}".rstrip(".")
        else:
            keys[key] = name
    keys = _without_nested(keys)
    return Renaming(
        keys=keys,
        added=dict(_computed(model, keys, tensors)),
        notes=tuple(_notes(model, config or {}, unbuilt)),
    )


def rename_device_map(device_map: Mapping[str, T], renaming: Renaming) -> dict[str, T]:
    """Return `device_map` in the names of `renaming`: without what it leaves out, with what it adds.

    Raises:
        NamesUnknownError: modules that are one in memory are on several devices.
    """
    renamed: dict[str, T] = {}
    for key, device in device_map.items():
        name = renaming.keys.get(key)
        if name is not None and renamed.setdefault(name, device) != device:
            raise NamesUnknownError(
                f"{key} is part of {name} in memory, which cannot be on both {renamed[name]} and {device}",
                hint="plan whole blocks (--experts block), or keep the checkpoint's names (--names checkpoint)",
            )
    return renamed | {module: device_map[key] for module, key in renaming.added.items() if key in device_map}


_HEADS = (
    *("lm_head", "embed_out", "proj_out", "cls", "predictions", "score", "classifier", "qa_outputs"),
    *("generator_predictions", "generator_lm_head", "vocab_projector", "vocab_transform", "vocab_layer_norm"),
    *("final_logits_bias", "pred_layer"),
)
"""What a model with a head has beside its base model, under its own name."""

_HEAD_CLASS = re.compile(r"For[A-Z]|LMHead|DoubleHeads|MTModel$|BertGenerationDecoder$")

_Rules = tuple[tuple[str, str], ...]
"""Patterns and replacements, applied once each and in order, to a name with a dot behind it."""

_FUSED: _Rules = ((r"\.experts\.\d+\.", ".experts."),)
_SPARSE: _Rules = ((r"\.block_sparse_moe\.", ".mlp."), *_FUSED)
_GRANITE_MOE: _Rules = (
    (r"\.block_sparse_moe\.(input_linear|output_linear)\.", ".block_sparse_moe.experts."),
    (r"\.block_sparse_moe\.router\.layer\.", ".block_sparse_moe.router."),
)
_LLAVA: _Rules = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.(model\.)?", "model.language_model."),
    (r"^(vision_tower|multi_modal_projector|image_newline|audio_tower|vision_embed_tokens)\.", r"model.\1."),
    (r"^(model\.)?vision_tower\.vision_model\.", r"\1vision_tower."),
)
_MLLAMA: _Rules = (*_LLAVA[:2], (r"^(vision_model|multi_modal_projector)\.", r"model.\1."))
_QWEN_VL: _Rules = (
    (r"^visual\.", "model.visual."),
    (r"^model\.(?!language_model\.|visual\.)", "model.language_model."),
)
_KIMI_VL: _Rules = (
    *_LLAVA[:2],
    (r"^mm_projector\.", "model.mm_projector."),
    (r"\.mm_projector\.proj\.0\.", ".mm_projector.in_proj."),
    (r"\.mm_projector\.proj\.2\.", ".mm_projector.out_proj."),
    (r"^vision_tower\.(encoder\.)?", "model.vision_tower."),
    (r"\.blocks\.(\d+)\.", r".layers.\1."),
    # Names inside these blocks change too, and not module by module: a key in one stands for the block.
    (r"^model\.vision_tower\.layers\.(\d+)\..*", r"model.vision_tower.layers.\1."),
    *_FUSED,
)
_VIT: _Rules = ((r"(^|\.)encoder\.layer\.(\d+)\..*", r"\1layers.\2."),)  # see above

_TYPES: tuple[tuple[str, str, str], ...] = (
    (
        "model",
        "rotary_emb",
        """
        afmoe apertus arcee aria_text axk1 bamba bitnet cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
        deepseek_v32 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon_h1 flex_olmo gemma gemma2
        gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granite granitemoe
        granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 jetmoe lfm2 llama llama4_text
        longcat_flash mellum mimo_v2_flash minimax minimax_m2 ministral ministral3 mistral mistral4 mixtral modernbert
        modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phi4_multimodal phimoe qwen2
        qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm
        starcoder2 vaultgemma
        """,
    ),
    (
        "model",
        "",
        """
        bart bigbird_pegasus blenderbot blenderbot-small granitemoehybrid idefics jamba marian mbart mvp nemotron_h opt
        pegasus pegasus_x plbart recurrent_gemma whisper zamba zamba2
        """,
    ),
    (
        "model",
        "language_model.rotary_emb",
        """
        aria cohere2_vision gemma3 gemma4 got_ocr2 internvl janus lfm2_vl llava llava_next llava_next_video
        llava_onevision mllama paligemma qwen2_audio vipllava voxtral
        """,
    ),
    (
        "model",
        "language_model.rotary_emb visual.rotary_pos_emb",
        "glm46v glm4v glm4v_moe qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe",
    ),
    ("model", "language_model.rotary_emb vision_tower.patch_positional_embedding", "mistral3"),
    ("model", "language_model.rotary_emb visual.vision_model.encoder.rotary_pos_emb", "paddleocr_vl"),
    ("model", "language_model.rotary_emb vision_tower.rotary_emb", "kimi_k25"),
    ("model", "text_model.rotary_emb", "idefics2 idefics3 smolvlm"),
    ("model", "encoder.rotary_emb decoder.rotary_emb", "t5gemma"),
    ("model", "encoder.embed_positions decoder.embed_positions", "m2m_100 nllb-moe speech_to_text"),
    ("model", "embed_positions", "xglm"),
    ("model", "pos_emb", "lfm2_moe"),
    ("transformer", "rotary_emb", "dbrx falcon"),
    (
        "transformer",
        "",
        "bloom codegen ctrl gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj mpt openai-gpt squeezebert xlm xlnet",
    ),
    ("gpt_neox", "rotary_emb", "gpt_neox"),
    ("backbone", "", "falcon_mamba mamba mamba2 xlstm"),
    ("bert", "", "bert bert-generation big_bird megatron-bert"),
    ("roberta", "", "camembert roberta xlm-roberta xlm-roberta-xl xmod"),
    ("deberta", "", "deberta deberta-v2"),
    ("esm", "rotary_embeddings", "esm"),
    *((name, "", name) for name in ("albert", "biogpt", "convnext", "convnextv2", "deit", "distilbert", "electra")),
    *((name, "", name) for name in ("hubert", "led", "longformer", "mpnet", "rwkv", "vit", "wav2vec2")),
    # These keep their parts at the root whatever the head: no base model to hold them.
    ("", "language_model.model.rotary_emb vision_model.rotary_embedding", "llama4"),
    ("", "", "clip longt5 mt5 sam siglip switch_transformers t5 umt5"),
)
"""Base, modules below it without a tensor in any file, model types.

The base is the attribute under which a model with a head holds its base model. The modules have buffers that
transformers computes when it builds the model; without a key in the map they would stay in RAM.
"""

_RENAMED: tuple[tuple[str, _Rules], ...] = (
    (
        """
        afmoe axk1 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe
        glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe jamba lfm2_moe longcat_flash mellum mimo_v2_flash olmoe
        qwen2_moe qwen3_moe qwen3_next qwen3_5_moe solar_open
        """,
        _FUSED,
    ),
    ("ernie4_5_moe", ((r"\.mlp\.moe_statics\.", ".mlp.gate."),)),
    ("axk1", ((r"\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),)),
    ("mixtral minimax minimax_m2 phimoe", _SPARSE),
    ("phimoe", ((r"\.mlp\.gate\.", ".mlp.router."),)),
    ("hy_v3", ((r"\.mlp\.router\.gate\.", ".mlp.gate."), (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."), *_FUSED)),
    ("nemotron_h", ((r"^backbone\.", "model."), *_FUSED)),
    ("granitemoe granitemoehybrid granitemoeshared", _GRANITE_MOE),
    ("gpt_neox", ((r"^embed_out\.", "lm_head."),)),
    ("gemma3n_text qwen3_5_text qwen3_5_moe_text", ((r"^model\.language_model\.", "model."), *_FUSED)),
    (
        """
        aria gemma3 got_ocr2 internvl llava llava_next llava_next_video llava_onevision mistral3 paligemma qwen2_audio
        vipllava voxtral
        """,
        _LLAVA,
    ),
    ("cohere2_vision lfm2_vl", _LLAVA[-1:]),
    ("mllama", _MLLAMA),
    ("qwen2_vl qwen2_5_vl", _QWEN_VL),
    ("paddleocr_vl", ((r"^mlp_AR\.", "model.projector."), (r"^visual\.", "model.visual."))),
    ("paddleocr_vl", ((r"^model\.(?!language_model\.|visual\.|projector\.)", "model.language_model."),)),
    ("kimi_k25", _KIMI_VL),
    ("clip siglip", ((r"^(text_model|vision_model)\.\1\.", r"\1."),)),
    ("esm", ((r"(^|\.)encoder\.layer\.\*\.", r"\1rotary_embeddings."),)),  # a slip of transformers 5 when it saves
    ("vit deit", _VIT),
)

_REMOTE_TYPES = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon"}
"""Types of configs that came with code of their own, and the type of transformers that took the model in."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How transformers names the models of one type."""

    base: str
    computed: tuple[str, ...]
    rules: tuple[tuple[re.Pattern[str], str], ...]

    def rename(self, name: str) -> str:
        """Return the name in memory of a module or parameter of a model with a head."""
        dotted = f"{name}."
        for pattern, replacement in self.rules:
            dotted = pattern.sub(replacement, dotted, count=1)
        return dotted[:-1]


def _families() -> Iterator[tuple[str, _Family]]:
    rules: dict[str, tuple[tuple[re.Pattern[str], str], ...]] = {}
    for types, more in _RENAMED:
        compiled = tuple((re.compile(pattern), replacement) for pattern, replacement in more)
        for model_type in types.split():
            rules[model_type] = (*rules.get(model_type, ()), *compiled)
    for base, computed, types in _TYPES:
        modules = tuple(f"{base}.{module}".lstrip(".") for module in computed.split())
        for model_type in types.split():
            yield model_type, _Family(base, modules, rules.get(model_type, ()))


_FAMILIES = dict(_families())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What a config says about the names of its model."""

    family: _Family
    is_bare: bool
    """Whether the model is the base model itself, without a head and without the prefix."""
    num_layers: int | None
    remote_class: str | None

    @classmethod
    def of(cls, config: Mapping[str, object] | None) -> _Model:
        model_type, architecture = _identity(config or {})
        known = _REMOTE_TYPES.get(model_type, model_type)
        family = _FAMILIES.get(known)
        is_headed = bool(_HEAD_CLASS.search(architecture))
        if family is None or not (is_headed or architecture.endswith("Model")):
            raise NamesUnknownError(
                f"what transformers calls the modules of {architecture} (model type {model_type}) is not known here",
                hint="keep the checkpoint's names (--names checkpoint); they are also those of a model that runs "
                "with code from its own repository",
            )
        return cls(
            family=family,
            is_bare=not is_headed,
            num_layers=_num_layers(config or {}),
            remote_class=architecture if known != model_type else None,
        )

    def leaves_out(self, name: str) -> bool:
        """Return whether transformers builds nothing for it: layers for multi-token prediction, past the last."""
        if _PREDICTION.match(name):
            return True
        layer = _TEXT_LAYER.match(name)
        return layer is not None and self.num_layers is not None and int(layer[1]) >= self.num_layers


_PREDICTION = re.compile(r"(model\.)?mtp(\.|$)")
_TEXT_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?layers\.([0-9]{1,9})(?:\.|$)")


def _identity(config: Mapping[str, object]) -> tuple[str, str]:
    """Return the model type and the class that a config names."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    for key, value in (("model_type", model_type), ("architectures", architecture)):
        if not isinstance(value, str):
            raise NamesUnknownError(
                f"what transformers calls the modules is not known: the config names no {key}",
                hint="keep the checkpoint's names (--names checkpoint), or complete config.json",
            )
    return str(model_type), str(architecture)


def _num_layers(config: Mapping[str, object]) -> int | None:
    text = config.get("text_config")
    for holder in (text if isinstance(text, Mapping) else {}, config):
        count = holder.get("num_hidden_layers")
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def _computed(model: _Model, keys: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Yield the modules that no tensor is below, each with the first key of the modules that run around it."""
    for module in model.family.computed:
        name = module.removeprefix(f"{model.family.base}.") if model.is_bare else module
        around = list(_parents(name))
        is_optional = module.endswith("rotary_embeddings")  # ESM has them or learned positions
        if is_optional and not any("rotary_embeddings" in tensor for tensor in tensors):
            continue
        if keys and not any(held in ("", name, *around) for held in keys.values()):
            prefixes = (*(f"{parent}." for parent in reversed(around)), "")
            yield name, next(key for prefix in prefixes for key, held in keys.items() if held.startswith(prefix))


def _without_nested(keys: Mapping[str, str]) -> dict[str, str]:
    """Let a name that lies below another become that other: both would cover the same tensors."""
    names = set(keys.values())
    return {key: _outermost(name, names) for key, name in keys.items()}


def _outermost(name: str, names: set[str]) -> str:
    return next((outer for outer in _parents(name) if outer in names), name)


def _parents(name: str) -> Iterator[str]:
    """Yield the modules around a module, outermost first."""
    end = name.find(".")
    while end >= 0:
        yield name[:end]
        end = name.find(".", end + 1)


def _notes(model: _Model, config: Mapping[str, object], unbuilt: Iterable[str]) -> Iterator[str]:
    if left_out := ", ".join(unbuilt):
        yield f"transformers builds no module for {left_out}: not in the device map"
    if model.remote_class is not None or "auto_map" in config:
        yield "these are the names of transformers' own class; code that comes with the model may use others"
