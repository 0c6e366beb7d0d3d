"""The memory of local tensors: what a model has for them already, or fresh memory where it has none."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from bigload.loading.checks import check_ram
from bigload.loading.schedule import ALIGNMENT, CPU
from bigload.loading.staging.accelerators import take_memory
from bigload.loading.tensors import Memory
from bigload.machine.huge_pages import allocate
from bigload.parallel.sharded_loading.byte_ranges import StoredTensor
from bigload.parallel.sharded_loading.shard_spec import Spans, shape_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPart:
    """What this process is to hold of a stored tensor.

    Attributes:
        spans: Which elements.
        dtype: What they become.
        device: Where.
        there: Memory for them, in the shape of `spans`, if there is some already.
        is_shared: Whether other processes read the same bytes, which the page cache then has for them.
    """

    stored: StoredTensor
    spans: Spans
    dtype: torch.dtype
    device: torch.device
    there: torch.Tensor | None = None
    is_shared: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.spans)

    @property
    def is_in_place(self) -> bool:
        """Whether bytes can go straight to what is there."""
        return self.there is not None and self.there.is_contiguous() and self.there.dtype == self.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        """Bytes of it in the files."""
        return prod(self.shape) * self.stored.item_bytes

    @property
    def place(self) -> str:
        """The device as schedules name it."""
        return CPU if self.device.type == "cpu" else str(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """A part, the `tensor` for it, row by row in memory, and the bytes of that: in `memory` from `start` on."""

    part: LocalPart
    tensor: torch.Tensor
    memory: Memory
    start: int = 0


def local_tensors(name: str, path: str, parts: Sequence[LocalPart]) -> list[LocalTensor]:
    """Return a tensor for each of `parts`: what is there, or fresh memory, of the CPU in one piece for all of them.

    `name` and `path` of the checkpoint are for the error.

    Raises:
        NotEnoughMemoryError: there is not as much.
    """
    sizes = [_room(part) if part.place == CPU and not part.is_in_place else 0 for part in parts]
    check_ram(name, path, sum(sizes))
    buffer = allocate(sum(sizes))
    found = []
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        if part.is_in_place:
            assert part.there is not None
            found.append(LocalTensor(part=part, tensor=part.there, memory=_bytes_of(part.there)))
        elif part.place == CPU:
            found.append(LocalTensor(part=part, tensor=_viewed(buffer, start, part), memory=buffer, start=start))
        else:
            raw = take_memory(part.place, part.num_bytes)
            found.append(LocalTensor(part=part, tensor=raw.view(part.dtype).view(part.shape), memory=raw))
        start += size
    return found


def _room(part: LocalPart) -> int:
    return -(-part.num_bytes // ALIGNMENT) * ALIGNMENT


def _viewed(buffer: Memory, start: int, part: LocalPart) -> torch.Tensor:
    if not part.num_bytes:
        return torch.empty(part.shape, dtype=part.dtype, device="cpu")
    raw = torch.frombuffer(buffer, dtype=torch.uint8, count=part.num_bytes, offset=start)
    return raw.view(part.dtype).view(part.shape)


def _bytes_of(tensor: torch.Tensor) -> Memory:
    """Return the memory of a contiguous tensor; of one on the CPU without numpy, good for as long as `tensor` is."""
    if tensor.device.type != "cpu":
        return tensor.view(-1).view(torch.uint8)
    if not tensor.nbytes:
        return bytearray()
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
