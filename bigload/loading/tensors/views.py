"""Torch tensors as views into loaded buffers, without copies, and torch's dtypes and shapes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from bigload.checkpoint.model import TensorInfo
from bigload.dtypes import DType, parse_dtype
from bigload.errors import OptionError, UnsupportedDTypeError
from bigload.loading.scheduling.read_jobs import Destination, Spread
from bigload.loading.scheduling.schedule import BufferSlot, RequestedTensor, Schedule
from bigload.machine.memory.huge_pages import Buffer
from bigload.planning.load_dtype import CASTABLE, EXPECTED_DTYPE

Memory = Buffer | torch.Tensor
"""A buffer of the CPU, or the map of a file, which tensors share; or the bytes of one tensor on another device."""

MOVED_AS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""What elements are taken for that only move, by their width in bits: integers stay what they are, bit by bit."""


def torch_dtype(dtype: DType) -> torch.dtype | None:
    """Return torch's counterpart of `dtype`, or `None` where the installed torch has none."""
    found = getattr(torch, dtype.torch_name, None) if dtype.torch_name is not None else None
    return found if isinstance(found, torch.dtype) else None


def dtype_of(dtype: torch.dtype) -> DType | None:
    """Return the dtype that torch calls `dtype`, or `None` where safetensors has none."""
    try:
        return parse_dtype(str(dtype))
    except ValueError:
        return None


def torch_shape(dtype: DType, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that torch gives a tensor: packed 4-bit types hold two elements in each of torch's."""
    return (*shape[:-1], shape[-1] // 2) if dtype.bits == 4 and shape else shape


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, without numpy; it has to live as long as the view."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def parsed_dtype(dtype: str | torch.dtype | None) -> DType | None:
    """Return the dtype that text or a torch dtype names."""
    if dtype is None:
        return None
    try:
        parsed = parse_dtype(str(dtype))
    except ValueError as error:
        raise OptionError.of("dtype", str(dtype), f"the name of a dtype ({error})") from None
    if parsed.name not in CASTABLE:
        raise OptionError.of("dtype", str(dtype), EXPECTED_DTYPE)
    return parsed


def spread_dtypes(destination: Destination, spread: Spread) -> tuple[torch.dtype, torch.dtype]:
    """Return in which dtype elements are read, and in which they are written: those of a cast, or plain integers."""
    if destination.cast is None:
        return MOVED_AS[spread.bits], MOVED_AS[spread.bits]
    stored, wanted = torch_dtype(destination.cast.stored), torch_dtype(destination.cast.wanted)
    assert stored is not None, "check_dtypes() comes first"
    assert wanted is not None, "check_dtypes() comes first"
    return stored, wanted


def check_dtypes(wanted: Iterable[RequestedTensor]) -> None:
    """Raise before anything is read if torch cannot represent one of `wanted`."""
    unsupported: dict[str, list[str]] = {}
    for want in wanted:
        for dtype in (want.tensor.dtype, want.dtype) if want.is_cast else (want.dtype,):
            is_odd = (
                dtype.bits == 4 and isinstance(want.tensor, TensorInfo) and (not want.shape or want.shape[-1] % 2 == 1)
            )
            if torch_dtype(dtype) is None or is_odd:
                unsupported.setdefault(dtype.name, []).append(want.name)
    for name, names in unsupported.items():
        raise UnsupportedDTypeError(name, names)


def as_tensors(schedule: Schedule, memory: Sequence[Memory]) -> dict[str, torch.Tensor]:
    """Return the tensors of `schedule` as views into `memory`, which lives as long as one of its tensors does.

    Each has a storage of its own, also those in one buffer: saving one does not save its neighbours, and tied weights
    are those that really share memory.
    """
    return {name: _view(slot, memory[slot.buffer]) for name, slot in schedule.slots.items()}


def _view(slot: BufferSlot, memory: Memory) -> torch.Tensor:
    want, dtype = slot.wanted, torch_dtype(slot.wanted.dtype)
    assert dtype is not None, "check_dtypes() comes first"
    shape = want.torch_shape
    if isinstance(memory, torch.Tensor):
        flat = memory.view(dtype)
    elif num_bytes := want.num_bytes:
        flat = torch.frombuffer(memory, dtype=dtype, count=num_bytes // dtype.itemsize, offset=slot.start)
    else:
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the caller's default device
    if (
        isinstance(want.tensor, TensorInfo) and want.tensor.strides is not None
    ):  # a view in a torch file stays one, as torch itself loads it
        return flat.as_strided(shape, want.tensor.strides)
    return flat.view(shape)
