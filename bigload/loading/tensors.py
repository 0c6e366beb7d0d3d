"""Bytes in memory to torch tensors: views into the buffers, no copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType
from bigload.errors import UnsupportedDTypeError
from bigload.loading.engine import Buffer
from bigload.loading.schedule import Schedule


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """Return torch's counterpart of `dtype`, or `None` where the installed torch has none."""
    found = getattr(torch, dtype.torch_name, None) if dtype.torch_name is not None else None
    return found if isinstance(found, torch.dtype) else None


def torch_shape(tensor: TensorInfo) -> tuple[int, ...]:
    """Return the shape that torch gives `tensor`: packed 4-bit types hold two elements in each of torch's."""
    if tensor.dtype.bits == 4 and tensor.shape:
        return (*tensor.shape[:-1], tensor.shape[-1] // 2)
    return tensor.shape


def check_dtypes(tensors: Iterable[TensorInfo]) -> None:
    """Raise before anything is read if torch cannot represent one of `tensors`.

    Raises:
        UnsupportedDTypeError: torch has no such dtype, or packs it along a dimension of odd length.
    """
    unsupported: dict[str, list[str]] = {}
    for tensor in tensors:
        is_odd = tensor.dtype.bits == 4 and (not tensor.shape or tensor.shape[-1] % 2 == 1)
        if torch_dtype(tensor.dtype) is None or is_odd:
            unsupported.setdefault(tensor.dtype.name, []).append(tensor.name)
    for dtype, names in unsupported.items():
        raise UnsupportedDTypeError(dtype, names)


def as_tensors(schedule: Schedule, buffers: Sequence[Buffer]) -> dict[str, torch.Tensor]:
    """Return the tensors of `schedule` as views into `buffers`, which live as long as one of the tensors does."""
    tensors = {}
    for name, slot in schedule.slots.items():
        info, dtype = slot.tensor, torch_dtype(slot.tensor.dtype)
        assert dtype is not None, "check_dtypes() comes first"
        if info.num_bytes:
            raw = torch.frombuffer(buffers[slot.buffer], dtype=torch.uint8, count=info.num_bytes, offset=slot.start)
            tensors[name] = raw.view(dtype).view(torch_shape(info))
        else:
            tensors[name] = torch.empty(torch_shape(info), dtype=dtype)
    return tensors
