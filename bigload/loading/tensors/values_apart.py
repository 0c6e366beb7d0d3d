"""Distance between the values of two tensors."""

from __future__ import annotations

import math

import torch

from bigload.dtypes import DType
from bigload.loading.tensors.views import MOVED_AS, torch_dtype
from bigload.planning.load_dtype import CASTABLE

STEP_ELEMENTS = 128 * 1024
"""Compared at a time: few enough to stay in a core's cache."""


def values_apart(first: memoryview, second: memoryview, dtype: DType) -> tuple[int, float, float]:
    """Return how many elements of both, which are of one length, differ, and how far finite values are apart.

    That is the largest difference and the sum of all, in float32 for each `STEP_ELEMENTS`, where that can hold it, or
    in float64 where `dtype` is; minus infinity and 0 where it is no plain floating-point dtype.
    """
    moved = MOVED_AS.get(dtype.bits, torch.uint8)
    one, other = (torch.frombuffer(each, dtype=torch.uint8).view(moved) for each in (first, second))
    num_changed, largest, total = 0, -math.inf, 0.0
    known = torch_dtype(dtype) if dtype.name in CASTABLE else None
    wide = torch.float64 if dtype.name == "F64" else torch.float32
    for left, right in zip(torch.split(one, STEP_ELEMENTS), torch.split(other, STEP_ELEMENTS), strict=True):
        num_changed += int(torch.count_nonzero(left ^ right))  # comparing with a bool for each takes four times as long
        if known is None:
            continue
        apart = (left.view(known).to(wide) - right.view(known).to(wide)).abs_()
        if not math.isfinite(most := float(apart.amax())):
            most = float(apart.nan_to_num_(0, posinf=0).amax())
        step = float(apart.sum())  # in float64 it would take nine times as long
        if not math.isfinite(step):
            step = float(apart.sum(dtype=torch.float64))
        largest, total = max(largest, most), total + step
    return num_changed, largest, total
