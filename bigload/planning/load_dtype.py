"""Sizes of tensors that are loaded in another floating-point type than they are stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bigload.checkpoint.model import Span, TensorInfo
from bigload.dtypes import DType

CASTABLE = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights are cast from and to. Fewer bits need scales, and leave out norms and embeddings: that is
quantisation, not a cast."""

EXPECTED_DTYPE = (
    "floating-point of 16 bits or more (bf16, fp16, fp32, fp64): 8 bits need scales, which a cast does not make"
)
"""For errors about a dtype that is not castable."""

_SCALES = ("scale", "absmax", "zero", "quant", "bitmap")


def as_loaded(tensors: Mapping[str, TensorInfo], dtype: DType | None) -> Mapping[str, TensorInfo]:
    """Return `tensors` as they are in memory when floating-point weights are converted to `dtype`.

    Plain floating-point types are converted. Integers, 8-bit floats and the scales of quantised weights are not: they
    mean something only together, in the types they have.
    """
    return tensors if dtype is None else {name: as_dtype(tensor, dtype) for name, tensor in tensors.items()}


def loaded_dtype(name: str, stored: DType, dtype: DType | None) -> DType:
    """Return the dtype in memory of a tensor if plain floating-point tensors become `dtype`."""
    if dtype is None or stored.name not in CASTABLE:
        return stored
    is_scale = any(word in name.rpartition(".")[2].lower() for word in _SCALES)
    return stored if is_scale else dtype


def as_dtype(tensor: TensorInfo, dtype: DType) -> TensorInfo:
    """Return one tensor as `as_loaded` does. Its span keeps its start, and is as long as the bytes in memory."""
    if loaded_dtype(tensor.name, tensor.dtype, dtype) != dtype:
        return tensor
    num_bytes = -(-tensor.num_elements * dtype.bits // 8)
    span = Span(tensor.span.file, tensor.span.start, tensor.span.start + num_bytes)
    return replace(tensor, dtype=dtype, span=span, strides=None)
