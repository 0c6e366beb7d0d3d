"""Local tensors: a rank's parts of stored tensors, in the memory that a model has for them, or in new memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from bigload.checkpoint.model import AssembledTensor
from bigload.loading.checks import check_ram
from bigload.loading.scheduling.piece_copies import ShardSpec, StridedCopy, spec_shape
from bigload.loading.scheduling.read_jobs import ALIGNMENT, CPU
from bigload.loading.staging.accelerators import take_memory
from bigload.loading.tensors.views import Memory, bytes_of, torch_dtype
from bigload.machine.memory.huge_pages import allocate, use_huge_pages
from bigload.units import KIB

_MOVED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Dtypes in which elements are copied unchanged, by width in bytes: torch copies no packed types."""

_STEP_ELEMENTS = 32 * KIB - 64
"""Elements per copy: from 32768 on, torch starts threads of its own, which compete with ours for the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """The part of a stored tensor that this process is to hold; `existing` is memory of the shape of `spec` for it.

    If it `is_shared`, other processes read the same bytes, which the page cache then has for them.
    """

    stored: AssembledTensor
    spec: ShardSpec
    dtype: torch.dtype
    device: torch.device
    existing: torch.Tensor | None = None
    is_shared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return spec_shape(self.spec)

    @property
    def is_in_place(self) -> bool:
        """Whether bytes can be read straight into the existing memory."""
        return self.existing is not None and self.existing.is_contiguous() and self.existing.dtype == self.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of it in the files."""
        return prod(self.shape) * self.stored.dtype.alignment

    @property
    def device_name(self) -> str:
        """The device as in schedules."""
        return CPU if self.device.type == "cpu" else str(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A part, the contiguous `tensor` for it, and its bytes: in `memory` from `start` on."""

    part: LocalPart
    tensor: torch.Tensor
    memory: Memory
    start: int = 0


def local_tensors(name: str, path: str, parts: Sequence[LocalPart]) -> list[LocalTensor]:
    """Return a tensor for each of `parts`: the existing memory, or new memory, on the CPU one buffer for all of them.

    `name` and `path` of the checkpoint are for the error.
    """
    sizes = [_room(part) if part.device_name == CPU and not part.is_in_place else 0 for part in parts]
    check_ram(name, path, sum(sizes))
    buffer = allocate(sum(sizes))
    found = []
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        if part.is_in_place:
            assert part.existing is not None
            is_here = part.device_name == CPU
            memory = bytes_of(part.existing) if is_here else part.existing.view(-1).view(torch.uint8)
            found.append(LocalTensor(part=part, tensor=part.existing, memory=memory))
        elif part.device_name == CPU:
            found.append(LocalTensor(part=part, tensor=_viewed(buffer, start, part), memory=buffer, start=start))
        else:
            raw = take_memory(part.device_name, part.num_bytes)
            found.append(LocalTensor(part=part, tensor=raw.view(part.dtype).view(part.shape), memory=raw))
        start += size
    filled = [each.tensor for each in found if each.part.device_name == CPU and each.part.is_in_place]
    use_huge_pages((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in filled)
    return found


def copy_runs(copy: StridedCopy, source: torch.Tensor, apart: int, local: LocalTensor) -> None:
    """Copy runs of bytes in `source`, each `apart` after the last, to where `copy` has them in `local`, cast."""
    part, target = local.part, local.tensor
    stored = torch_dtype(part.stored.dtype)
    assert stored is not None, "torch has the dtypes of all that is loaded"
    if stored == part.dtype:
        stored = _MOVED_AS[stored.itemsize]
        target = target.view(stored)
    form = copy.count, copy.run_bytes // stored.itemsize
    runs = source.view(stored).as_strided(form, (apart // stored.itemsize, 1))
    strides = copy.target_stride, copy.target_step
    target = target.as_strided(form, strides, target.storage_offset() + copy.target)
    step = max(_STEP_ELEMENTS // form[1], 1) if part.device_name == CPU else copy.count
    for first in range(0, copy.count, step):
        target[first : first + step].copy_(runs[first : first + step])


def _room(part: LocalPart) -> int:
    return -(-part.num_bytes // ALIGNMENT) * ALIGNMENT


def _viewed(buffer: Memory, start: int, part: LocalPart) -> torch.Tensor:
    if not part.num_bytes:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu")
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=part.num_bytes, offset=start)
    return raw.view(part.dtype).view(part.shape)
