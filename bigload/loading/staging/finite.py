"""Check that stored scales are numbers."""

from __future__ import annotations

from bigload.dtypes import DType
from bigload.loading.staging.cpu_stager import bytes_in
from bigload.loading.tensors import torch_dtype

_NO_NUMBER = 255
"""Power of two, as stored in a byte, that is none (E8M0 of OCP Microscaling Formats 1.0)."""


def all_finite(memory: bytearray, dtype: DType) -> bool:
    """Return whether all scales in `memory`, floats or powers of two in a byte, are finite."""
    values, wanted = bytes_in(memory), torch_dtype(dtype)
    if wanted is not None and dtype.bits > 8:
        return bool(values.view(wanted).isfinite().all())
    return bool((values != _NO_NUMBER).all())
