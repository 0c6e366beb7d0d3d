"""Dtype of each written tensor, the reasons for keeping a stored dtype, and the dtype that config.json states."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DTYPES, STORED_DTYPES, DType, parse_dtype
from bigload.errors import OptionError
from bigload.planning.load_dtype import CASTABLE, EXPECTED_DTYPE, as_dtype

_TORCH_NAMES = {DTYPES[name].torch_name for name in CASTABLE}
_FLOAT32 = DTYPES["F32"]
_Q8_0 = STORED_DTYPES["Q8_0"]
"""Blocks of ggml, which only GGUF files hold: layouts say whether they take it."""

_DTYPE_KEYS = ("dtype", "torch_dtype")
_WILDCARDS = frozenset("*?[")


class Kept(StrEnum):
    """Reason for keeping the stored dtype of a tensor."""

    AS_FLOAT32 = "kept in float32, as asked"
    NOT_FLOATING = "not floating-point"
    EIGHT_BIT = "8-bit or packed floats, which mean something only with their scales"
    SCALE = "scales or tables of quantised weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeRule:
    """The dtype of each tensor as it is written.

    Plain floating-point tensors (float16, bfloat16, float32, float64) become `dtype`, except that those which match a
    pattern of `keep_fp32` become float32, or stay it. All others stay as they are, as they do when a plan or a load
    asks for a dtype.

    transformers 5 treats `_keep_in_fp32_modules` in the same way: what matches is float32 after loading and after
    saving, whatever it was (`core_model_loading.py`). It looks for patterns anywhere in a name; here one with `*`, `?`
    or `[` is matched against the whole name, and one without against whole parts of it: `mlp.gate` is in
    `layers.0.mlp.gate.weight`, and not in `layers.0.mlp.gate_proj.weight`.

    Attributes:
        dtype: Dtype to cast to; `None` casts nothing.
        keep_fp32: Patterns of names of tensors that are written in float32.
    """

    dtype: DType | None = None
    keep_fp32: tuple[str, ...] = ()

    def __call__(self, tensor: TensorInfo) -> DType:
        """Return the dtype in which `tensor` is written."""
        if self.dtype is None:
            return tensor.dtype
        keeps = any(matches(pattern, tensor.name) for pattern in self.keep_fp32)
        return as_dtype(tensor, _FLOAT32 if keeps else self.dtype).dtype

    def kept(self, tensor: TensorInfo) -> Kept | None:
        """Return why `tensor` is not written in the dtype that was asked for; `None` if it is."""
        written = self(tensor)
        if self.dtype is None or written == self.dtype:
            return None
        if tensor.dtype.name in CASTABLE:
            keeps = any(matches(pattern, tensor.name) for pattern in self.keep_fp32)
            return Kept.AS_FLOAT32 if keeps and written == _FLOAT32 else Kept.SCALE
        return Kept.EIGHT_BIT if tensor.dtype.name.startswith(("F8", "F6", "F4")) else Kept.NOT_FLOATING

    def kept_of(self, tensors: Iterable[TensorInfo]) -> Mapping[Kept, tuple[str, ...]]:
        """Return the names of those of `tensors` that are kept, by reason; reasons without any are left out."""
        found: dict[Kept, list[str]] = {}
        if self.dtype is None:
            return {}
        for tensor in tensors:
            reason = self.kept(tensor)
            if reason is not None:
                found.setdefault(reason, []).append(tensor.name)
        return {reason: tuple(found[reason]) for reason in Kept if reason in found}

    def check(self, tensors: Iterable[TensorInfo]) -> None:
        """Raise if a pattern matches no tensor."""
        if not self.keep_fp32:
            return
        names = [tensor.name for tensor in tensors if as_dtype(tensor, _FLOAT32).dtype == _FLOAT32]
        for pattern in self.keep_fp32:
            if not any(matches(pattern, name) for name in names):
                expected = "a pattern, or part of a name, that matches a floating-point tensor of the checkpoint"
                raise OptionError.of("keep_fp32", pattern, expected)


def dtype_rule(dtype: str | DType | None, *, keep_fp32: Sequence[str] = ()) -> DTypeRule:
    """Return the rule of the options `dtype`, text as `dtypes.parse_dtype` reads it, and `keep_fp32`."""
    if isinstance(keep_fp32, str) or not all(isinstance(pattern, str) and pattern for pattern in keep_fp32):
        raise OptionError.of("keep_fp32", keep_fp32, "a list of patterns of tensor names")
    if dtype is None:
        if keep_fp32:
            raise OptionError.of("keep_fp32", list(keep_fp32), "a dtype along with it, for the other tensors")
        return DTypeRule()
    try:
        is_block = str(dtype).upper() == _Q8_0.name
        parsed = _Q8_0 if is_block else dtype if isinstance(dtype, DType) else parse_dtype(str(dtype))
    except ValueError as error:
        raise OptionError.of("dtype", str(dtype), f"the name of a dtype ({error})") from None
    if parsed.name not in CASTABLE and not is_block:
        raise OptionError.of("dtype", str(dtype), EXPECTED_DTYPE)
    return DTypeRule(dtype=parsed, keep_fp32=tuple(keep_fp32))


def matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` matches the tensor `name`: see `DTypeRule`."""
    if _WILDCARDS.intersection(pattern):
        return fnmatchcase(name, pattern)
    return f".{pattern}." in f".{name}."


def config_with_dtype(config_text: bytes, dtype: DType) -> bytes:
    """Return a config.json with `dtype` in place of every dtype that it states.

    `from_pretrained(dtype="auto")`, the default of transformers 5, builds the whole model in that dtype. A config
    without a dtype gets a `torch_dtype`, which every version reads: transformers would take the dtype of the first
    tensor, which may have been kept in float32.

    Text that is no JSON object stays unchanged, and so does every config if `dtype` has 8 bits: torch computes nothing
    in such dtypes, so no model can be built in one. Dtypes in `quantization_config` are not those of the weights.
    """
    try:
        config = json.loads(config_text)
    except (ValueError, RecursionError):
        return config_text
    name = dtype.torch_name
    if not isinstance(config, dict) or name is None or name not in _TORCH_NAMES:
        return config_text
    changed = _with_dtype(config, name)
    if not any(changed.get(key) for key in _DTYPE_KEYS):
        changed = {**changed, "torch_dtype": name}
    if changed == config:
        return config_text
    return (json.dumps(changed, indent=2) + "\n").encode()  # as save_pretrained writes it, but for the order of keys


def _with_dtype(section: Mapping[str, object], name: str) -> dict[str, object]:
    changed = dict(section)
    for key, value in section.items():
        if key in _DTYPE_KEYS:
            changed[key] = _renamed_dtype(value, name)
        elif isinstance(value, dict) and key != "quantization_config":
            changed[key] = _with_dtype(value, name)
    return changed


def _renamed_dtype(value: object, name: str) -> object:
    """Return `name` in place of a dtype; of a dict, which names one for each part of a model, in place of each.

    Anything else is left alone: vocabularies, too, are sections of some configs, and have a token for every word.
    """
    if isinstance(value, dict):
        return {part: _renamed_dtype(given, name) for part, given in value.items()}
    is_dtype = isinstance(value, str) and value.removeprefix("torch.") in _TORCH_NAMES
    return name if is_dtype else value
