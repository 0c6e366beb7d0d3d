"""Weights that a process and its workers have in memory once: pages of a file that has no name and is on no disk.

Who writes to one gets a page of its own (a private map), so nobody's changes are seen by others. `memfd_create` and not
/dev/shm: containers often have 64 MB there, and what has no name cannot be left behind.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from bigload.loading.readers.mapped import MappedFile

_ALIGNMENT = 64
_MAX_WRITE_BYTES = 1 << 30
"""The kernel takes less than 2 GiB at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor is in shared memory: the storage it is part of, in bytes, and its place there, in elements."""

    storage_start: int
    storage_bytes: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Shared memory as workers get to know it: the descriptor that they inherit, and places by number of weight."""

    descriptor: int
    num_bytes: int
    places: Mapping[int, Place]

    def tensors(self) -> dict[int, torch.Tensor]:
        """Return the tensors by their numbers. The descriptor is closed; the memory lives as long as they do."""
        try:
            return _views(self.descriptor, self.num_bytes, self.places)
        finally:
            os.close(self.descriptor)


class WeightSharing:
    """Weights of a model on their way into shared memory. Closed when workers have them, and at the end of the `with`.

    Made before the workers are, who inherit the descriptor; filled while they start.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("bigload-weights", os.MFD_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor of this process. Those of workers are theirs, and the memory lives on."""
        os.close(self.descriptor)

    def share(self, weights: Mapping[int, torch.Tensor]) -> SharedWeights:
        """Move `weights` there, which stay what they are; those that are not in memory of the host are copied.

        Tensors that share memory go on doing so. Memory of each is given back before the next is moved.
        """
        groups: dict[int, list[int]] = {}
        for number, tensor in weights.items():
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(number)
        places: dict[int, Place] = {}
        end = 0
        for numbers in groups.values():
            places.update((number, _place(weights[number], end)) for number in numbers)
            end += -(-places[numbers[0]].storage_bytes // _ALIGNMENT) * _ALIGNMENT
        os.ftruncate(self.descriptor, end)
        views = _views(self.descriptor, end, places)
        for numbers in groups.values():
            first = weights[numbers[0]]
            self._write(places[numbers[0]].storage_start, first.untyped_storage().cpu())  # type: ignore[no-untyped-call]
            if first.device.type == "cpu":
                for number in numbers:
                    weights[number].data = views[number]
        return SharedWeights(descriptor=self.descriptor, num_bytes=end, places=places)

    def _write(self, start: int, storage: torch.UntypedStorage) -> None:
        if not storage.nbytes():
            return
        left = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
        while left:
            num_written = os.pwrite(self.descriptor, left[:_MAX_WRITE_BYTES], start)
            start, left = start + num_written, left[num_written:]


def _place(tensor: torch.Tensor, start: int) -> Place:
    return Place(
        storage_start=start,
        storage_bytes=tensor.untyped_storage().nbytes(),
        dtype=tensor.dtype,
        offset=int(tensor.storage_offset()),
        shape=tuple(tensor.shape),
        strides=tensor.stride(),
    )


def _views(descriptor: int, num_bytes: int, places: Mapping[int, Place]) -> dict[int, torch.Tensor]:
    if not num_bytes:
        return {number: torch.empty_strided(p.shape, p.strides, dtype=p.dtype) for number, p in places.items()}
    mapped = MappedFile(Path(f"/proc/self/fd/{descriptor}"), num_bytes)
    storages: dict[int, torch.UntypedStorage] = {}
    for place in places.values():
        if place.storage_start not in storages and place.storage_bytes:
            part = mapped.buffer[place.storage_start : place.storage_start + place.storage_bytes]
            storages[place.storage_start] = torch.frombuffer(part, dtype=torch.uint8).untyped_storage()
    mapped.close()  # the memory lives as long as storages refer to it
    return {number: _view(place, storages.get(place.storage_start)) for number, place in places.items()}


def _view(place: Place, storage: torch.UntypedStorage | None) -> torch.Tensor:
    if storage is None or not place.storage_bytes:
        return torch.empty_strided(place.shape, place.strides, dtype=place.dtype)
    return torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.shape, place.strides)
