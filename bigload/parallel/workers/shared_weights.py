"""Weights in memory that a process shares with its workers: private maps of a memfd (memfd_create(2)).

A write copies the page (copy on write), so no process sees the changes of another. Not /dev/shm: containers often limit
it to 64 MB, and a file without a name cannot be left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bigload.loading.readers.mapped import MappedFile
from bigload.loading.tensors.views import bytes_of

_ALIGNMENT = 64
_MAX_WRITE_BYTES = 1 << 30
"""The kernel takes less than 2 GiB at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor in shared memory: its storage, in bytes, and its offset and strides there, in elements."""

    storage_start: int
    storage_bytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Shared memory as workers receive it: the descriptor that they inherit, and tensors by number of weight."""

    descriptor: int
    num_bytes: int
    by_number: Mapping[int, SharedTensor]

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the tensors by their numbers. The descriptor is closed; the memory lives as long as they do."""
        try:
            return _views(self.descriptor, self.num_bytes, self.by_number)
        finally:
            os.close(self.descriptor)


@contextmanager
def memory_file(name: str) -> Iterator[int]:
    """Give the descriptor of an empty file in memory; it lives as long as descriptors or maps of it."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def share_weights(descriptor: int, weights: Mapping[int, torch.Tensor]) -> SharedWeights:
    """Move `weights` into a memory file: the same tensor objects, with other storage; copy those of accelerators.

    Tensors that share a storage still do. The memory of each is freed before the next is moved.
    """
    groups: dict[int, list[int]] = {}
    for number, tensor in weights.items():
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(number)
    shared: dict[int, SharedTensor] = {}
    end = 0
    for numbers in groups.values():
        shared.update((number, _shared_tensor(weights[number], end)) for number in numbers)
        end += -(-shared[numbers[0]].storage_bytes // _ALIGNMENT) * _ALIGNMENT
    os.ftruncate(descriptor, end)
    views = _views(descriptor, end, shared)
    for numbers in groups.values():
        first = weights[numbers[0]]
        _write(descriptor, shared[numbers[0]].storage_start, first.untyped_storage().cpu())  # type: ignore[no-untyped-call]
        if first.device.type == "cpu":
            for number in numbers:
                weights[number].data = views[number]
    return SharedWeights(descriptor=descriptor, num_bytes=end, by_number=shared)


def _write(descriptor: int, start: int, storage: torch.UntypedStorage) -> None:
    left = bytes_of(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
    while left:
        num_written = os.pwrite(descriptor, left[:_MAX_WRITE_BYTES], start)
        start, left = start + num_written, left[num_written:]


def _shared_tensor(tensor: torch.Tensor, start: int) -> SharedTensor:
    return SharedTensor(
        storage_start=start,
        storage_bytes=tensor.untyped_storage().nbytes(),
        dtype=tensor.dtype,
        offset=int(tensor.storage_offset()),
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
    )


def _views(descriptor: int, num_bytes: int, shared: Mapping[int, SharedTensor]) -> dict[int, torch.Tensor]:
    if not num_bytes:
        return {number: torch.empty_strided(p.shape, p.strides, dtype=p.dtype) for number, p in shared.items()}
    mapped = MappedFile(Path(f"/proc/self/fd/{descriptor}"), num_bytes)
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in shared.values():
        if tensor.storage_start not in storages and tensor.storage_bytes:
            part = mapped.buffer[tensor.storage_start : tensor.storage_start + tensor.storage_bytes]
            storages[tensor.storage_start] = torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
    mapped.close()  # the memory lives as long as storages refer to it
    return {number: _view(tensor, storages.get(tensor.storage_start)) for number, tensor in shared.items()}


def _view(tensor: SharedTensor, storage: torch.UntypedStorage | None) -> torch.Tensor:
    if storage is None or not tensor.storage_bytes:
        return torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, tensor.offset, tensor.shape, tensor.strides)
