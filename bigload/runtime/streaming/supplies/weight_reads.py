"""Read schedule of some weights of a block, from files or RAM to one device; computed once, run for each load."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from bigload.checkpoint.byte_source import ByteSource, PositionalReader
from bigload.checkpoint.model import Span, StoredTensor, TensorInfo
from bigload.dtypes import DType
from bigload.loading.engine import Stager, read
from bigload.loading.scheduling.schedule import BufferSlot, RequestedTensor, schedule_reads
from bigload.loading.settings import settings
from bigload.loading.source_pool import opened_sources
from bigload.loading.strategy.read_strategy import usual_threads
from bigload.loading.tensors.views import Memory, as_tensors, dtype_of, torch_dtype
from bigload.machine.files.page_cache import drop_cached_pages
from bigload.machine.memory.huge_pages import address_of
from bigload.machine.threads.activities import NO_RECORDER
from bigload.planning.timing.residency import READ_BY_ONE_THREAD_BELOW_BYTES
from bigload.runtime.modules.module_tensors import version_of
from bigload.runtime.offload.assembled_weights import AssembledWeight, Signature, check_file
from bigload.runtime.offload.weight_sources import MemoryWeight, WeightSource
from bigload.runtime.streaming.weights import Weight

BLOCK_BYTES = 8 * 2**20
"""The size of a read: a block has few of them, and threads share them."""


def can_be_read(weight: Weight) -> bool:
    """Return whether the bytes of `weight` are all that it takes: it is cast once at most, and plain where it is."""
    source, held = weight.source, weight.placeholder
    wanted = dtype_of(held.dtype)
    if isinstance(source, MemoryWeight):
        stored, is_plain, shape = dtype_of(source.dtype), _is_plain(source.tensor), tuple(source.tensor.shape)
    else:
        stored, shape = source.tensor.dtype, source.tensor.torch_shape
        is_plain = source.dtype in (torch_dtype(source.tensor.dtype), held.dtype)
    if stored is None or wanted is None or not is_plain or shape != tuple(held.shape):
        return False
    return stored == wanted or min(stored.bits, wanted.bits) >= 8


class WeightReads:
    """Read schedule of `weights`, of which each `can_be_read`, to the device `place`.

    Attributes:
        schedule: The memory that the weights take, and the reads that fill it.
    """

    def __init__(self, weights: Sequence[Weight], place: str) -> None:
        first: dict[int, int] = {}  # tied weights are one, by what holds them between forwards
        self._numbers = [first.setdefault(id(weight.placeholder), number) for number, weight in enumerate(weights)]
        each = [(str(number), weights[number]) for number in first.values()]
        stored = {name: _stored(name, weight.source) for name, weight in each}
        self._files: dict[str, Signature] = {}
        self._values: dict[str, tuple[MemoryWeight, TensorInfo]] = {}
        for name, weight in each:
            form = stored[name]
            if not isinstance(weight.source, MemoryWeight):
                self._files.update(weight.source.stored_files)
            elif isinstance(form, TensorInfo):
                self._values[form.span.file] = weight.source, form
        schedule = schedule_reads(
            (
                RequestedTensor(tensor=stored[name], dtype=_wanted(stored[name], weight), device=place)
                for name, weight in each
            ),
            block_bytes=BLOCK_BYTES,
        )
        self._pinned = [schedule.slots[name] for name, weight in each if place != "cpu" and _is_pinned(weight.source)]
        apart = {_file(slot) for slot in self._pinned}
        self.schedule = schedule._replace(jobs=tuple(job for job in schedule.jobs if job.file not in apart))
        self._ranges: dict[str, list[tuple[int, int]]] = {}
        for job in self.schedule.jobs:
            if job.file in self._files:
                self._ranges.setdefault(job.file, []).append((job.offset, job.offset + job.num_bytes))
        self.num_file_bytes = sum(stop - start for ranges in self._ranges.values() for start, stop in ranges)
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}
        self._settings = settings()
        is_cast = place == "cpu" and any(slot.wanted.is_cast for slot in schedule.slots.values())
        is_small = self.schedule.num_bytes < READ_BY_ONE_THREAD_BELOW_BYTES
        self._threads = self._settings.threads or (1 if is_small else usual_threads(is_cast=is_cast))

    def tensors(self, memory: Sequence[Memory]) -> list[torch.Tensor]:
        """Return the weights, in their order, as views into `memory`, of which each schedule's buffer has one."""
        found = as_tensors(self.schedule, memory)
        return [found[str(number)] for number in self._numbers]

    def pinned(self) -> Iterator[tuple[torch.Tensor, int, torch.dtype]]:
        """Yield values that a device may copy from where they are, for which there are no reads.

        With each, the number of the schedule's buffer that it goes to, and its dtype there.
        """
        self._note_values()
        for slot in self._pinned:
            wanted = torch_dtype(slot.wanted.dtype)
            assert wanted is not None, "can_be_read() comes first"
            yield self._value(_file(slot)), slot.buffer, wanted

    def carry_out(self, memory: Sequence[Memory], stagers: Mapping[str, Stager]) -> None:
        """Fill `memory`, as `loading.engine.read` does."""
        self._note_values()
        self._check_files()
        files = sorted({job.file for job in self.schedule.jobs})
        with opened_sources(files, self._open) as sources:
            read(
                self.schedule,
                memory,
                sources,
                stagers,
                threads=self._threads,
                max_inflight_bytes=self._settings.max_inflight_bytes,
                recorder=NO_RECORDER,
            )
        self._check_files()

    def is_stale(self) -> bool:
        """Return whether a value in RAM is another one now, or was written to, since it was read."""
        return any(
            (now := source.whole) is not self._seen[file][0] or version_of(now) != self._seen[file][1]
            for file, (source, _) in self._values.items()
            if file in self._seen
        )

    def forget(self) -> None:
        """Drop what the page cache has of the files."""
        for file, ranges in self._ranges.items():
            with suppress(OSError):  # gone meanwhile: the next read says so
                drop_cached_pages(Path(file), ranges)

    def _note_values(self) -> None:
        values = {file: source.whole for file, (source, _) in self._values.items()}
        self._seen = {file: (value, version_of(value)) for file, value in values.items()}

    def _value(self, file: str) -> torch.Tensor:
        """Return a value in RAM in the form that it had when the reads were planned."""
        source, planned = self._values[file]
        value = source.part_of(self._seen[file][0].detach())
        if tuple(value.shape) != planned.shape:
            raise ValueError(f"a weight in RAM of shape {planned.shape} has become one of {tuple(value.shape)}")
        return value.to(device="cpu", dtype=torch_dtype(planned.dtype)).contiguous()

    def _check_files(self) -> None:
        for file in self._ranges:
            check_file(Path(file), self._files[file])

    def _open(self, file: str) -> ByteSource:
        if file in self._values:
            return TensorSource(self._value(file))
        reader = PositionalReader(Path(file))
        reader.expect(self._ranges[file])
        return reader


class TensorSource:
    """A contiguous tensor of the CPU, read as if it were a file (`ByteSource`)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`. By memmove, which lets other threads of Python run meanwhile."""
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        if offset + num_bytes > self._tensor.nbytes:
            raise ValueError(f"bytes {offset} to {offset + num_bytes} of a tensor of {self._tensor.nbytes}")
        address = self._tensor.data_ptr() + offset
        for buffer in buffers:
            if buffer.nbytes:
                ctypes.memmove(address_of(buffer), address, buffer.nbytes)
                address += buffer.nbytes

    def close(self) -> None:
        """Do nothing: the tensor goes with its last user."""


def _file(slot: BufferSlot) -> str:
    (span,) = slot.wanted.spans
    return span.file


def _stored(name: str, source: WeightSource) -> StoredTensor:
    """Return the form of a weight where it is, under a name of its own and that of a file as this machine has it."""
    if isinstance(source, AssembledWeight):
        return replace(source.tensor, name=name)
    if not isinstance(source, MemoryWeight):
        span = source.tensor.span
        return replace(source.tensor, name=name, span=Span(str(source.path), span.start, span.stop))
    value, dtype = source.tensor, dtype_of(source.dtype)
    assert dtype is not None, "can_be_read() comes first"
    return TensorInfo(name, dtype, tuple(value.shape), Span(f"{name} in RAM", 0, value.nbytes))


def _wanted(stored: StoredTensor, weight: Weight) -> DType:
    held = weight.placeholder.dtype
    wanted = stored.dtype if torch_dtype(stored.dtype) == held else dtype_of(held)
    assert wanted is not None, "can_be_read() comes first"
    return wanted


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is its elements and nothing else."""
    is_dense = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_meta
    return type(tensor) in (torch.Tensor, nn.Parameter) and is_dense and not tensor.is_conj() and not tensor.is_neg()


def _is_pinned(source: WeightSource) -> bool:
    if not isinstance(source, MemoryWeight) or source.tensor.device.type != "cpu" or not source.tensor.is_contiguous():
        return False
    try:
        return source.tensor.is_pinned()
    except RuntimeError:  # nothing here pins
        return False
