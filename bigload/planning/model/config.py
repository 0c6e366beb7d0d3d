"""Typed access to a model's config.json, which anyone may have written.

Families name the same number differently and nest it differently. Every question is asked here by one name, of the
section that describes the text decoder; an answer of another type than expected counts as none. Defaults of model code
are not looked up: what a config leaves out is unknown, unless a family's rule says otherwise (`kv_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

from bigload.dtypes import DTYPES, DType

MAX_NUMBER = 2**31
"""Larger numbers in a config describe no model."""

_TEXT_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config", "language_model_config", "decoder")
_SUB_SECTIONS = ("attn_config", "ffn_config", "linear_attn_config")
_MAX_NESTING = 4

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "model_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_decoder_layers": ("num_decoder_layers", "decoder_layers"),
    "num_heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "attention_heads",
    ),
    "num_kv_heads": (
        "num_key_value_heads",
        "num_kv_heads",
        "n_head_kv",
        "n_kv_heads",
        "kv_n_heads",
        "multi_query_group_num",
    ),
    "head_dim": ("head_dim", "d_kv", "attention_head_dim", "kv_channels"),
    "ffn_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim", "dff"),
    "expert_size": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": (
        "num_experts_per_tok",
        "moe_top_k",
        "num_experts_per_token",
        "top_k_experts",
        "moe_k",
        "moe_topk",
        "num_selected_experts",
        "experts_per_token",
    ),
    "window": ("sliding_window", "attention_window_size", "sliding_window_size"),
    "vocab_size": ("vocab_size",),
    "state_size": ("mamba_d_state", "ssm_state_size", "state_size"),
    "state_groups": ("mamba_n_groups", "mamba_ngroups", "n_groups"),
    "scan_piece": ("mamba_chunk_size", "chunk_size"),
    "linear_key_dim": ("linear_key_head_dim", "linear_head_dim"),
    "linear_key_heads": ("linear_num_key_heads", "linear_num_heads"),
    "trained_context": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "seq_length",
        "max_seq_len",
        "max_sequence_length",
    ),
    "num_mtp_layers": ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"),
}

_ACTIVATIONS = ("hidden_activation", "hidden_act", "activation_function", "mlp_hidden_act", "activation")
_DTYPE_NAMES = {dtype.torch_name: dtype for dtype in DTYPES.values() if dtype.name in ("F16", "BF16", "F32", "F64")}


@dataclass(frozen=True)
class ModelConfig:
    """A config, asked for what it says about the text decoder.

    `raw` is the parsed file, `None` where there is none. Questions go to the nested section of the decoder first and to
    the root after it. Numbers are whole, not negative and below `MAX_NUMBER`.
    """

    raw: Mapping[str, object] | None

    @property
    def is_known(self) -> bool:
        return bool(self.raw)

    @cached_property
    def model_types(self) -> tuple[str, ...]:
        """Of the decoder's section and of those around it, innermost first."""
        return tuple(value for section in _sections(self.raw) if isinstance(value := section.get("model_type"), str))

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        found = self.raw.get("architectures") if self.raw else None
        return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()

    @cached_property
    def dtype(self) -> DType | None:
        """The floating-point type in which the model is meant to be run."""
        name = self._first("torch_dtype", "dtype")
        return _DTYPE_NAMES.get(name.removeprefix("torch.")) if isinstance(name, str) else None

    @property
    def activation(self) -> str | None:
        """Name of the activation function between the layers of the feed-forward."""
        name = self._first(*_ACTIVATIONS)
        if name is None and isinstance(name := self._first("feed_forward_proj"), str):  # T5
            return "gelu_new" if name == "gated-gelu" else name.removeprefix("gated-")
        return name if isinstance(name, str) else None

    @cached_property
    def layer_types(self) -> tuple[str, ...] | None:
        """The kind of attention of every layer, `None` unless all are named."""
        found = self._first("layer_types", "layers_block_type")
        if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
            return None
        return tuple(found)

    @property
    def head_dim(self) -> int | None:
        """Elements of one key; the model's width divided among its heads where the config does not say."""
        said = self.number("head_dim")
        if said:
            return said
        width, heads = self.number("hidden_size"), self.number("num_heads")
        return width // heads if width and heads else None

    @property
    def num_kv_heads(self) -> int | None:
        if self.flag("multi_query"):
            return 1
        return self.number("num_kv_heads") or self.number("num_heads")

    @property
    def experts_per_token(self) -> int | None:
        """Experts that a token goes through; the largest number where each layer has its own, as in Hunyuan."""
        said = self._first(*_ALIASES["experts_per_token"])
        if isinstance(said, list):
            said = max(said, default=None) if all(map(_is_number, said)) else None
        return said if _is_number(said) and said else self.count("experts_per_token")

    def number(self, question: str) -> int | None:
        """Return the whole number that answers `question`, one of the names above or a key as the file has it.

        An explicit null is an answer: the section of the decoder takes back what the root says.
        """
        for value in self._answers(*_ALIASES.get(question, (question,))):
            if value is None or _is_number(value):
                return value
        return None

    def count(self, question: str) -> int | None:
        """Return the first answer to `question` that is at least 1; others, and an explicit null, are passed over."""
        answers = self._answers(*_ALIASES.get(question, (question,)))
        return next((value for value in answers if _is_number(value) and value), None)

    def flag(self, key: str) -> bool | None:
        """Return a yes or no."""
        return next((value for value in self._answers(key) if isinstance(value, bool)), None)

    @property
    def text(self) -> Mapping[str, object]:
        """The section that describes the text decoder: a nested one, or all of it."""
        return next(iter(_sections(self.raw)), {})

    def section(self, key: str) -> ModelConfig:
        """Return a nested section of the root, for example the one of the vision tower."""
        nested = self.raw.get(key) if self.raw else None
        return ModelConfig(nested if isinstance(nested, Mapping) else None)

    def _first(self, *keys: str) -> object:
        return next(self._answers(*keys), None)

    def _answers(self, *keys: str) -> Iterator[object]:
        return (section[key] for section in self._searched for key in keys if key in section)

    @cached_property
    def _searched(self) -> tuple[Mapping[str, object], ...]:
        """Sections in the order in which they are asked; every block of a model asks, so they are found once."""
        found: list[Mapping[str, object]] = []
        for section in _sections(self.raw):
            nested = (section.get(key) for key in _SUB_SECTIONS)
            found += [section, *(below for below in nested if isinstance(below, Mapping))]
        return tuple(found)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_NUMBER


def _sections(config: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    """Return the sections from that of the text decoder out to the root."""
    section = config
    path: list[Mapping[str, object]] = []
    while section is not None and len(path) < _MAX_NESTING:
        path.append(section)
        nested = (section.get(key) for key in _TEXT_SECTIONS)
        section = next((below for below in nested if isinstance(below, Mapping)), None)
    return path[::-1]
