"""Supply without copies: weights in the pages of their file, or in RAM already, for blocks that run on the CPU.

To load weights is to read their pages into the page cache and to enter them into the page table of this process,
ahead of the block that would otherwise take a page fault for each. To drop them is to take them out of the table. They
stay in the page cache as long as the system keeps them. Tensors that are kept stay valid: pages are read again.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import nn

from bigload.errors import ReadError
from bigload.loading.readers.mapped import populate_pages_in_parallel, release_pages
from bigload.machine.files.page_cache import drop_cached_pages, has_all_cached
from bigload.machine.memory.huge_pages import HUGE_PAGE_BYTES, no_memory
from bigload.runtime.offload.assembled_weights import AssembledWeight
from bigload.runtime.offload.stored_weights import FileWeight
from bigload.runtime.offload.weight_sources import MemoryWeight
from bigload.runtime.streaming.supplies.supply import Supply
from bigload.runtime.streaming.weights import Weight

_NEIGHBOURS_BYTES = 64 * 1024
"""Tensors as near as this in a file are populated as one range: what lies between is padding, or little."""


def is_in_place(weight: Weight, device: torch.device) -> bool:
    """Return whether `weight` can be used on `device` where it is, as it is."""
    source = weight.source
    if isinstance(source, FileWeight):
        is_aligned = source.tensor.span.start % weight.alignment == 0
        return device.type == "cpu" and source.is_as_wanted and is_aligned and source.dtype == weight.placeholder.dtype
    if isinstance(source, AssembledWeight):
        return False
    return source.tensor.device == device and source.dtype == weight.placeholder.dtype


_SPLITS_ALLOWED_BELOW_BYTES = 16 * HUGE_PAGE_BYTES
"""Of larger ranges the huge pages at both ends stay in the page table, which neighbours share: an eighth at most."""


class MappedSupply(Supply):
    """Weights of a block in mapped files, and those that are in RAM already.

    Embeddings are not fetched, and count no bytes: a token needs one row of many thousands, whose page its use faults
    in.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        sources = [weight.source for weight in weights]
        stored = [source for source in sources if isinstance(source, FileWeight)]
        whole = [each.source for each in weights if isinstance(each.source, FileWeight) and not _is_looked_up(each)]
        self._tensors = [source.tensor if isinstance(source, MemoryWeight) else source.view() for source in sources]
        self._in_memory = [
            (number, source) for number, source in enumerate(sources) if isinstance(source, MemoryWeight)
        ]
        self._files = {source.path: source for source in stored}
        self._ranges = _merged(whole)
        self.num_bytes = self.num_page_bytes = sum(each.stop - each.start for each in self._ranges)

    def fetch(self) -> None:
        """Have all pages in the page cache, and enter into the page table those that were not there."""
        for place, buffer, start, stop in self._ranges:
            if has_all_cached(place.path, start, stop):
                continue  # faults of those who compute, each of 16 pages, take half the time
            reason = populate_pages_in_parallel(buffer, start // mmap.PAGESIZE * mmap.PAGESIZE, stop)
            if reason == errno.ENOMEM:
                raise no_memory(f"the map of {place.path}", stop - start)
            if reason:
                raise ReadError(place.path, f"the disk did not give bytes {start} to {stop} ({os.strerror(reason)})")

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights: the same tensors each time, as long as the values in memory are the same."""
        for place in self._files.values():  # also those whose pages stay: they are still the file's
            place.check()
        for number, source in self._in_memory:
            self._tensors[number] = source.tensor
        return self._tensors

    def drop(self, *, forget: bool) -> None:
        for place, buffer, start, stop in self._ranges:
            is_large = not forget and stop - start >= _SPLITS_ALLOWED_BELOW_BYTES
            release_pages(buffer, start, stop, page_bytes=HUGE_PAGE_BYTES if is_large else mmap.PAGESIZE)
            if forget:
                with suppress(OSError):  # gone meanwhile: the next fetch says so
                    drop_cached_pages(place.path, [(start, stop)])


def _is_looked_up(weight: Weight) -> bool:
    return all(isinstance(slot.module, nn.Embedding) for slot in weight.slots)


class _MappedRange(NamedTuple):
    """Bytes `start` to `stop` of a mapped file."""

    place: FileWeight
    buffer: memoryview
    start: int
    stop: int


def _merged(places: Sequence[FileWeight]) -> list[_MappedRange]:
    """Return the bytes of `places`, by file and offset, neighbours as one."""
    ranges: list[_MappedRange] = []
    for place in sorted(places, key=lambda place: (place.path, place.tensor.span.start)):
        span = place.tensor.span
        if not span.num_bytes:
            continue
        last = ranges[-1] if ranges else None
        if last is not None and last.place.path == place.path and span.start <= last.stop + _NEIGHBOURS_BYTES:
            ranges[-1] = last._replace(stop=max(last.stop, span.stop))
        else:
            ranges.append(_MappedRange(place, place.map(), span.start, span.stop))
    return ranges
