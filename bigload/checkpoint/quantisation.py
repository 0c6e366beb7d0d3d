"""Recognise weights that are stored quantised, by the config and by the names of the tensors beside them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from bigload.checkpoint.model import Checkpoint, StoredForm, TensorInfo, forms_of
from bigload.dtypes import STORED_DTYPES

_NAMES = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "mxfp4": "MXFP4",
    "compressed-tensors": "compressed-tensors",
}
_SIGNS = (
    ("gptq", re.compile(r"\.g_idx$")),
    ("awq", re.compile(r"\.qweight$")),
    ("bitsandbytes", re.compile(r"\.quant_state\.bitsandbytes__|\.weight\.absmax$|\.SCB$")),
    ("compressed-tensors", re.compile(r"\.weight_packed$")),
    ("mxfp4", re.compile(r"_blocks$")),
    ("fp8", re.compile(r"\.weight_scale(_inv)?$")),
)
"""Tensors that only one method writes, the first match decides: for a checkpoint without a config that names it."""

_BITS = {"awq": 4, "gptq": 4, "fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}
_HELPERS = re.compile(
    r"qzeros|scales|g_idx|zeros|absmax|nested_absmax|nested_quant_map|quant_map|SCB|weight_format|[kv]_scale"
    r"|(weight|input|output)_(scale|scale_inv|scale_2|zero_point|shape|g_idx|global_scale)|.*_scales|bitsandbytes__.*"
)
"""Tensors that say how to unpack others, by the last part of their names; they hold no parameters."""


_UNPACKING = re.compile(
    r"(?:.*\.)?(?:weight_(?:scale|scale_inv|scale_2|zero_point|global_scale)|SCB|absmax|qzeros|scales)"
)
"""Tensors without which the values of a weight are not known."""


@dataclass(frozen=True, kw_only=True)
class Quantisation:
    """Form of quantised weights.

    Attributes:
        method: Name of the method, such as `AWQ`.
        bits: Bits of one quantised parameter; `None` where neither config nor names tell.
        group_size: Inputs that share a scale, where compressed-tensors says so; else 0 or less.
    """

    method: str
    bits: int | None
    tensors: Mapping[str, TensorInfo] = field(repr=False)
    group_size: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether one stored value holds several parameters."""
        return self.bits is not None and any(_is_packed(form, self.bits) for form in self._weights)

    @cached_property
    def num_parameters(self) -> int | None:
        """About how many parameters the model has once unpacked; `None` without `bits`."""
        if self.bits is None:
            return None
        return sum(count * _num_parameters(form, self.bits) for form, count in self._weights.items())

    @cached_property
    def _weights(self) -> Counter[StoredForm]:
        """Numbers of tensors of each form that hold parameters."""
        forms = forms_of(self.tensors).items()
        return Counter([form for name, form in forms if not _is_helper(name.rpartition(".")[2])])

    def __str__(self) -> str:
        return self.method if self.bits is None else f"{self.bits} bits ({self.method})"


class WeightInParts(NamedTuple):
    """A weight in several tensors, which a library puts together to one of a class of its own.

    Attributes:
        method: How it is packed.
        descriptions: Tensors that say in words how to put them together, by name.
        metadata: What the metadata of the file says about that.
    """

    name: str
    method: str
    parts: tuple[str, ...]
    descriptions: tuple[str, ...] = ()
    metadata: str = ""

    @property
    def library(self) -> str:
        """The package that packs and unpacks it."""
        return self.method.partition(",")[0]


_STATE_4_BITS = re.compile(r"(.+)\.quant_state\.bitsandbytes__(?:nf4|fp4)")
_PARTS_4_BITS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")


def weights_in_parts(checkpoint: Checkpoint) -> tuple[WeightInParts, ...]:
    """Return the weights of `checkpoint` that bitsandbytes or torchao have packed.

    Those of other methods are what their layers have: tensors with a name each.
    """
    return (*_packed_by_bitsandbytes(checkpoint.tensors), *_packed_by_torchao(checkpoint))


def _packed_by_bitsandbytes(tensors: Mapping[str, TensorInfo]) -> Iterator[WeightInParts]:
    for name in tensors:
        found = _STATE_4_BITS.fullmatch(name)
        if found is not None and found[1] in tensors:
            parts = (found[1], *(f"{found[1]}.{part}" for part in _PARTS_4_BITS if f"{found[1]}.{part}" in tensors))
            yield WeightInParts(name=found[1], method="bitsandbytes, 4 bits", parts=parts, descriptions=(name,))
        elif name.endswith(".SCB") and (weight := f"{name.removesuffix('SCB')}weight") in tensors:
            formats = tuple(each for each in (f"{weight}_format",) if each in tensors)
            yield WeightInParts(name=weight, method="bitsandbytes, 8 bits", parts=(weight, name), descriptions=formats)


def _packed_by_torchao(checkpoint: Checkpoint) -> Iterator[WeightInParts]:
    metadata = {name: text for shard in checkpoint.shards for name, text in shard.metadata.items() if "." in name}
    for name, text in metadata.items():
        owner, _, leaf = name.rpartition(".")
        parts = tuple(f"{owner}._{leaf}_{part}" for part in _names_of_parts(text))
        if parts and all(part in checkpoint.tensors for part in parts):
            yield WeightInParts(name=name, method="torchao", parts=parts, metadata=text)


def _names_of_parts(text: str) -> Sequence[str]:
    """Return the names of inner tensors in what torchao notes about a tensor; none for what is something else."""
    try:
        noted = json.loads(text)
    except ValueError:
        return ()
    names = noted.get("_tensor_data_names") if isinstance(noted, Mapping) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else ()


def unpacks_weights(name: str) -> bool:
    """Return whether the tensor `name` of a quantised checkpoint says how large the values of a weight are."""
    return _UNPACKING.fullmatch(name) is not None


def quantisation_of(checkpoint: Checkpoint) -> Quantisation | None:
    """Return how the weights of `checkpoint` are quantised; `None` if they are not."""
    settings = _settings(checkpoint.config)
    tensors = checkpoint.tensors
    method = settings.get("quant_method") or (_bitsandbytes(settings) and "bitsandbytes") or _method_by_names(tensors)
    if not isinstance(method, str):
        return None
    size = _first_group(settings).get("group_size")
    return Quantisation(
        method=_NAMES.get(method, method[:40]),
        bits=_bits(method, settings, tensors),
        tensors=tensors,
        group_size=size if isinstance(size, int) else 0,
    )


def _settings(config: Mapping[str, object] | None) -> Mapping[str, object]:
    sections = [config or {}, *(value for value in (config or {}).values() if isinstance(value, Mapping))]
    found = (section.get(key) for section in sections for key in ("quantization_config", "compression_config"))
    return next((settings for settings in found if isinstance(settings, Mapping)), {})


def _bitsandbytes(settings: Mapping[str, object]) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))


def _method_by_names(tensors: Mapping[str, TensorInfo]) -> str | None:
    dtype_names = {form.dtype_name for form in forms_of(tensors).values()}
    if not any(name.startswith(("I8", "I16", "I32", "I64", "U", "F8", "F4")) for name in dtype_names):
        return None
    found = {method for name in tensors for method, sign in _SIGNS if sign.search(name)}
    return next((method for method, _ in _SIGNS if method in found), None)


def _bits(method: str, settings: Mapping[str, object], names: Iterable[str]) -> int | None:
    said = settings.get("bits") or settings.get("w_bit") or _first_group(settings).get("num_bits")
    if isinstance(said, int) and not isinstance(said, bool) and 1 <= said <= 8:
        return said
    if method == "bitsandbytes":
        return 4 if settings.get("load_in_4bit") or any(".quant_state." in name for name in names) else 8
    return _BITS.get(method)


def _first_group(settings: Mapping[str, object]) -> Mapping[str, object]:
    """Return what compressed-tensors says of the weights of the first group of layers."""
    groups = settings.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


@lru_cache(maxsize=1024)
def _is_helper(last_part: str) -> bool:
    return _HELPERS.fullmatch(last_part) is not None


def _num_parameters(form: StoredForm, bits: int) -> int:
    return form.num_bytes * 8 // bits if _is_packed(form, bits) else form.num_elements


def _is_packed(form: StoredForm, bits: int) -> bool:
    return (
        form.dtype_name[0] in "IU"
        and not form.dtype_name.startswith("IQ")
        and STORED_DTYPES[form.dtype_name].bits > bits
    )
