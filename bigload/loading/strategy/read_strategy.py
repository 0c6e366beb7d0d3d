"""Read strategy of a load: I/O method, number of threads, size of a read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bigload.checkpoint.byte_source import ByteSource, SourceScheme, scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.distributed.host_share import HostShare
from bigload.errors import UnsupportedMethodError
from bigload.loading.readers.direct import MAX_ALIGNMENT, CacheFirstReader, DirectReader
from bigload.loading.readers.mapped import MappedFile
from bigload.loading.scheduling.read_jobs import BLOCK_BYTES
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.settings import LoadSettings, Method
from bigload.loading.strategy.io_method import FileRanges, MethodChoice, choose_method
from bigload.machine.files.byte_ranges import merged_ranges
from bigload.machine.threads.activities import Phase, Recorder
from bigload.machine.threads.inflight_pool import LENT_BLOCK_BYTES, BlockPool
from bigload.machine.threads.thread_pool import MAX_DEFAULT_THREADS
from bigload.units import MIB

PARALLEL_BYTES = 64 * MIB
"""Less than this is read by one thread by default: starting threads takes longer than reading it."""

DISK_THREADS = 8
"""Threads that wait for a disk need no core: more of them than cores keep its queue filled. Of all ranks of a host."""

NETWORK_THREADS = 16
"""Connections: one seldom fills a line, and each waits for two round trips before its first byte."""

OpenSource = Callable[[Path], ByteSource]


class ReadStrategy(NamedTuple):
    """I/O method, threads and bounds of one load."""

    method: Method
    reason: str
    threads: int
    max_inflight_bytes: int
    open_source: OpenSource

    @property
    def block_bytes(self) -> int:
        """The size of a read."""
        return _block_bytes(self.threads, self.max_inflight_bytes)


def choose_strategy(
    checkpoint: Checkpoint,
    wanted: Sequence[RequestedTensor],
    chosen: LoadSettings,
    open_source: OpenSource | None,
    recorder: Recorder,
) -> ReadStrategy:
    """Return the strategy for reading the bytes of `wanted` under the settings in `chosen`."""
    files, scheme = _files(checkpoint, wanted), scheme_of(checkpoint.root)
    num_bytes = sum(file.num_bytes for file in files)
    if open_source is not None:
        choice = MethodChoice(method=Method.READ, reason="the caller opens the files")
    elif not scheme.is_local:
        reason = f"locations of the scheme {scheme.name} are read by byte ranges"
        if chosen.method in (Method.DIRECT, Method.MMAP):
            raise UnsupportedMethodError(checkpoint.root, chosen.method.value, reason)
        choice = MethodChoice(method=Method.READ, reason=reason, waits_for_disk=True)
    else:
        with recorder.span(Phase.WAIT):
            choice = choose_method(files, asked=chosen.method)
    is_cast = any(want.is_cast for want in wanted)
    share = chosen.share or HostShare.of_process_alone()
    usual = max(DISK_THREADS // share.processes, 1) if choice.waits_for_disk else usual_threads(share, is_cast=is_cast)
    usual = usual if scheme.is_local else NETWORK_THREADS
    threads = chosen.threads or (1 if num_bytes < PARALLEL_BYTES and scheme.is_local else usual)
    return ReadStrategy(
        method=choice.method,
        reason=choice.reason,
        threads=threads,
        max_inflight_bytes=chosen.max_inflight_bytes,
        open_source=open_source or _opener(choice, scheme, threads, chosen.max_inflight_bytes, recorder),
    )


def usual_threads(share: HostShare | None = None, *, is_cast: bool) -> int:
    """Return the default number of threads for cached bytes: two per core, since each waits for page faults.

    Casting keeps a core busy by itself.
    """
    cores = (share or HostShare.of_process_alone()).cores
    return max(min(int(cores), MAX_DEFAULT_THREADS) if is_cast else min(int(2 * cores), DISK_THREADS), 1)


def _files(checkpoint: Checkpoint, wanted: Sequence[RequestedTensor]) -> list[FileRanges]:
    """Return the bytes that will be read, by file; of columns, those from the first to the last."""
    spans: dict[str, list[tuple[int, int]]] = {}
    for want in wanted:
        for span in want.spans:
            spans.setdefault(span.file, []).append((span.start, span.stop))
    return [
        FileRanges(path=checkpoint.root / file, ranges=tuple(merged_ranges(ranges)))
        for file, ranges in sorted(spans.items())
    ]


def _block_bytes(threads: int, max_inflight_bytes: int) -> int:
    """Return the size of a read: smaller than usual where the bound would leave threads without one."""
    return min(BLOCK_BYTES, max(max_inflight_bytes // threads, MIB))


def _opener(
    choice: MethodChoice, scheme: SourceScheme, threads: int, max_inflight_bytes: int, recorder: Recorder
) -> OpenSource:
    if choice.method is Method.MMAP:
        return partial(MappedFile, recorder=recorder)
    if choice.method is Method.READ:
        return lambda location: scheme.open(location, recorder)
    reader = CacheFirstReader if choice.cache_first else DirectReader
    # No larger than a read of this load with the disk's blocks around it, nor more of them than may be under way.
    block_bytes = min(LENT_BLOCK_BYTES, _block_bytes(threads, max_inflight_bytes) + 2 * MAX_ALIGNMENT)
    num_blocks = max(min(threads, max_inflight_bytes // block_bytes), 1)
    return partial(reader, pool=BlockPool(num_blocks, block_bytes=block_bytes), recorder=recorder)
