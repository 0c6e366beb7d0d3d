"""Distance between the values of two tensors."""

from __future__ import annotations

import math

import torch

from bigload.dtypes import DType
from bigload.loading.tensors.views import MOVED_AS, torch_dtype
from bigload.machine.memory.huge_pages import Buffer
from bigload.planning.load_dtype import CASTABLE


def values_apart(first: Buffer, second: Buffer, num_bytes: int, dtype: DType) -> tuple[int, float, float]:
    """Return how many elements of the first `num_bytes` of both differ, and how far finite values are apart.

    That is the largest difference and the sum of all, in float32, or in float64 where `dtype` is; minus infinity and 0
    where it is no plain floating-point dtype.
    """
    one, other = (torch.frombuffer(buffer, dtype=torch.uint8)[:num_bytes] for buffer in (first, second))
    moved = MOVED_AS.get(dtype.bits, torch.uint8)
    num_changed = int((one.view(moved) != other.view(moved)).sum())
    known = torch_dtype(dtype)
    if dtype.name not in CASTABLE or known is None:
        return num_changed, -math.inf, 0.0
    wide = torch.float64 if dtype.name == "F64" else torch.float32
    apart = (one.view(known).to(wide) - other.view(known).to(wide)).abs()
    apart = torch.where(apart.isfinite(), apart, 0)
    return num_changed, float(apart.max()), float(apart.sum(dtype=torch.float64))
