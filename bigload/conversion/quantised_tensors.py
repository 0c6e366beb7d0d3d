"""Tensors of a checkpoint whose weights are to be quantised: which are, what is stored of them, what the config says.

Only matrices in the numbered blocks of a model are quantised. Those that the quality of answers depends on most stay
plain: embeddings, norms, the output layer, routers of experts, and the towers of other media than text. So do matrices
that have no whole blocks of scales, and those that vLLM fuses with such a one, because it reads a fused layer in one
form only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bigload.checkpoint.model import TensorInfo
from bigload.conversion.arithmetic.rounded_weights import (
    KnownScales,
    RoundedWeights,
    Rounding,
    ScalesOfWeights,
)
from bigload.conversion.arithmetic.unchanged import ConstantRow, Unchanged
from bigload.conversion.computed_tensor import ComputedTensor, Operand, shape_of
from bigload.dtypes import DTYPES, DType
from bigload.errors import OptionError
from bigload.units import counted

_GROUPS = (32, 64, 128)
SCHEMES: Mapping[str, Rounding] = {
    "fp8-block": Rounding(8, is_float=True, block=(128, 128)),
    "fp8-channel": Rounding(8, is_float=True, block=(1, 0)),
    "int8": Rounding(8, is_float=False, block=(1, 0)),
    **{f"int4-g{size}": Rounding(4, is_float=False, block=(1, size)) for size in _GROUPS},
}
"""What weights can be quantised to, by the names of the command line."""

_DTYPES = ("BF16", "F16", "F32")
_PACKED_COLUMNS = 32
"""Packed rows are whole words at every width, and those that vLLM's kernels read."""

_PLAIN = re.compile(r"norm|router|(?:^|_)(?:gate|head|score)$")
_EMBEDDING = re.compile(r"embed|^(?:wte|wpe|relative_attention_bias)$")
_TOWERS = re.compile(r"vision|visual|image|audio|speech|video")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"))
"""Layers that vLLM joins into one."""

TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Types of models whose layers are stored inputs x outputs (`Conv1D` of transformers)."""


def scheme_named(text: str) -> Rounding:
    """Return the scheme of this name."""
    found = SCHEMES.get(text)
    if found is None:
        raise OptionError.of("quantize", text, f"one of {', '.join(SCHEMES)}")
    return found


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """Tensors and config of a quantised checkpoint, the names of the weights, and sentences about it."""

    tensors: Sequence[Operand]
    weights: Sequence[str]
    config: Mapping[str, object]
    notes: Sequence[str]


def _never(_name: str) -> bool:
    return False


def quantised(
    tensors: Mapping[str, Operand],
    config: Mapping[str, object] | None,
    scheme: str,
    *,
    keeps: Callable[[str], bool] = _never,
    takes: Callable[[str], bool] = _never,
    dtype_of: Callable[[Operand], DType] = lambda tensor: tensor.dtype,
) -> Quantised:
    """Return what is stored in place of `tensors`, which are plain ones.

    Args:
        tensors: By name.
        config: The model's.
        scheme: One of `SCHEMES`.
        keeps: Whether a weight stays plain that would be quantised.
        takes: Whether a matrix is quantised that would stay plain by its name.
        dtype_of: The dtype in which a weight is rounded, if not its own.
    """
    rounding = scheme_named(scheme)
    _check_model(tensors, config, scheme, keeps)
    assert config is not None, "checked above"
    plain = {name for name, tensor in tensors.items() if keeps(name) or not _is_taken(name, tensor, takes)}
    unfit = {name for name in tensors if name not in plain and not _fits(tensors[name], rounding)}
    if asked := [name for name in unfit if takes(name)]:
        shape = list(shape_of(tensors[asked[0]]))
        raise OptionError.of("quantize_also", asked[0], f"a matrix in whole blocks of {scheme}; this one is {shape}")
    beside = _fused_with(plain | unfit, tensors) - plain - unfit
    left = plain | unfit | beside
    weights = [name for name in tensors if name not in left]
    if not weights:
        raise OptionError.of("quantize", scheme, "a checkpoint with matrices of 16 or 32 bits in blocks that it suits")
    written: list[Operand] = []
    known = KnownScales()
    for name, tensor in tensors.items():
        if name in left:
            written.append(tensor)
        else:
            wanted = dtype_of(tensor)
            source = tensor if wanted == tensor.dtype else replace(_cast(tensor), dtype=wanted)
            written += _parts(source, rounding, known)
    _check_names(written)
    notes = [f"{counted(len(weights), 'weight')} quantised to {scheme}, rounded to nearest"]
    if unfit:
        some = min(unfit)
        text = f"{counted(len(unfit), 'weight')} without whole blocks of scales stay plain: {some}"
        text += f" {list(shape_of(tensors[some]))} for one"
        notes.append(text + (f"; and {len(beside)} that vLLM fuses with them" if beside else ""))
    ignored = [module for name in tensors if name in left and (module := _ignored(name, tensors[name]))]
    settings = _fp8_settings(ignored) if rounding.is_by_block else _compressed_settings(rounding, ignored)
    return Quantised(tensors=written, weights=weights, config={**config, "quantization_config": settings}, notes=notes)


def _check_model(
    tensors: Mapping[str, Operand], config: Mapping[str, object] | None, scheme: str, keeps: Callable[[str], bool]
) -> None:
    if config is None:
        raise OptionError.of("quantize", scheme, "a checkpoint with a config.json, which has to name the method")
    if (kind := config.get("model_type")) in TRANSPOSED:
        raise OptionError.of("quantize", scheme, f"a model of linear layers: those of {kind} are stored transposed")
    stack = next((name for name in tensors if _is_stack(name, tensors[name]) and not keeps(name)), None)
    if stack is not None:
        hint = "write experts one by one first (--names checkpoint), or keep them plain: --keep-plain '*experts*'"
        expected = f"experts in matrices of their own: {stack} {list(shape_of(tensors[stack]))} has several"
        raise OptionError.of("quantize", scheme, expected, hint=hint)


def _check_names(written: Sequence[Operand]) -> None:
    twice = [name for name, count in Counter(each.name for each in written).items() if count > 1]
    if twice:
        raise OptionError.of("quantize", twice[0], "a checkpoint without a tensor of this name beside the weight")


def _is_stack(name: str, tensor: Operand) -> bool:
    return len(shape_of(tensor)) == 3 and "experts" in name and tensor.dtype.name in _DTYPES


def _is_taken(name: str, tensor: Operand, takes: Callable[[str], bool]) -> bool:
    """Return whether a tensor is a matrix that is quantised, by its name unless `takes` it whatever its name is."""
    module, _, leaf = name.rpartition(".")
    if leaf != "weight" or len(shape_of(tensor)) != 2 or tensor.dtype.name not in _DTYPES:
        return False
    parts = module.split(".")
    if (isinstance(tensor, TensorInfo) and tensor.strides is not None) or any(map(_EMBEDDING.search, parts)):
        return False
    if takes(name):
        return True
    in_block = any(part.isdigit() for part in parts)
    return in_block and not any(_PLAIN.search(part) or _TOWERS.search(part) for part in parts)


def _fits(tensor: Operand, rounding: Rounding) -> bool:
    """Return whether a matrix is whole blocks, or whole words in each row."""
    rows, columns = shape_of(tensor)
    each, width = rounding.block
    width = max(width, _PACKED_COLUMNS if rounding.is_packed else 1)
    return bool(rows and columns) and rows % each == 0 and columns % width == 0


def _fused_with(plain: Iterable[str], tensors: Mapping[str, Operand]) -> set[str]:
    """Return the weights that are fused with one of `plain` in a block."""
    found = set()
    for name in plain:
        module, _, leaf = name.rpartition(".")
        owner, dot, last = module.rpartition(".")
        for group in _FUSED:
            if leaf == "weight" and last in group:
                found |= {other for each in group if (other := f"{owner}{dot}{each}.weight") in tensors}
    return found


def _cast(tensor: Operand) -> ComputedTensor:
    if isinstance(tensor, ComputedTensor):
        return tensor
    return ComputedTensor(tensor.name, tensor.dtype, shape_of(tensor), Unchanged(tensor))


def _parts(source: Operand, rounding: Rounding, known: KnownScales) -> list[Operand]:
    """Return what is stored in place of the matrix `source`."""
    module = source.name.rpartition(".")[0]
    rows, columns = shape_of(source)
    name, dtype, shape = f"{module}.weight", DTYPES["F8_E4M3"], (rows, columns)
    if rounding.is_packed:
        name, dtype, shape = f"{module}.weight_packed", DTYPES["I32"], (rows, columns * rounding.bits // 32)
    scale, scale_dtype = ("weight_scale_inv", DTYPES["F32"]) if rounding.is_by_block else ("weight_scale", source.dtype)
    scales = ScalesOfWeights(source, rounding, known)
    parts = [
        ComputedTensor(name, dtype, shape, RoundedWeights(source, rounding, known)),
        ComputedTensor(f"{module}.{scale}", scale_dtype, rounding.grid(rows, columns), scales),
    ]
    if rounding.is_packed:
        parts.append(ComputedTensor(f"{module}.weight_shape", DTYPES["I64"], (2,), ConstantRow(shape_of(source))))
    return list(parts)


def _ignored(name: str, tensor: Operand) -> str:
    """Return the module of a weight that stays plain, as the config has to name it; nothing for what is no layer."""
    module, _, leaf = name.rpartition(".")
    if _is_stack(name, tensor):
        return module
    return module if leaf == "weight" and len(shape_of(tensor)) > 1 else ""


def _fp8_settings(ignored: Sequence[str]) -> dict[str, object]:
    """Return what transformers' `FineGrainedFP8Config` and vLLM's `Fp8Config` read."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(ignored),
    }


def _compressed_settings(rounding: Rounding, ignored: Sequence[str]) -> dict[str, object]:
    """Return what compressed-tensors reads: weights only, activations are those of the model."""
    size = rounding.block[1]
    weights = {
        "num_bits": rounding.bits,
        "type": "float" if rounding.is_float else "int",
        "symmetric": True,
        "strategy": "group" if size else "channel",
        "group_size": size or None,
        "dynamic": False,
    }
    written = "float-quantized" if rounding.is_float else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": written,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group, "format": written}},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }
