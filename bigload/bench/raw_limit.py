"""Raw reads of a checkpoint's bytes, the upper limit of this machine for any loader.

They are written independently of the loading engine, so that the two can disagree: whole blocks in file order, an
equal share for each thread, no tensors, views or header checks. A loader's share of that rate is what it costs.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from bigload.bench.loaded_memory import MemoryKind
from bigload.checkpoint.model import Checkpoint, spans_of
from bigload.units import MIB, counted

_BLOCK_BYTES = 16 * MIB
_DIRECT_BLOCK_BYTES = 4 * MIB
_ALIGNMENT = mmap.PAGESIZE
_MADV_POPULATE_READ = 22  # Linux 5.14, madvise(2); Python's mmap module does not name it
_Job = TypeVar("_Job")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class RawKind(StrEnum):
    """Source and destination of a raw read.

    `memory`: positional reads into fresh memory in huge pages. `map`: mapped files, all pages populated. `disk`: direct
    reads into reused memory in huge pages, which measures the disk itself.
    """

    MEMORY = "memory"
    MAP = "map"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class RawRead:
    """A kind of raw read and its number of threads."""

    kind: RawKind
    threads: int

    @property
    def name(self) -> str:
        return f"raw {self.kind}, {counted(self.threads, 'thread')}"


@dataclass(frozen=True, slots=True)
class RawBlock:
    """Byte range of a file, and its offset `position` among all bytes that are read."""

    file: Path
    start: int
    stop: int
    position: int


def kind_for(memory: MemoryKind, *, is_from_disk: bool) -> RawKind:
    """Return which raw read is the limit for a load that ends in `memory`."""
    if is_from_disk:
        return RawKind.DISK
    return RawKind.MAP if memory is MemoryKind.FILE else RawKind.MEMORY


def raw_reads(kinds: Iterable[RawKind], *, num_cores: int) -> tuple[RawRead, ...]:
    """Return the raw reads to try, a few thread counts per kind; the fastest is the limit.

    A disk needs more requests in flight than there are cores; memory does not.
    """
    counts = {
        RawKind.MEMORY: (num_cores, 2 * num_cores),
        RawKind.MAP: (num_cores, 2 * num_cores),
        RawKind.DISK: (4, 8),
    }
    return tuple(RawRead(kind, count) for kind in dict.fromkeys(kinds) for count in dict.fromkeys(counts[kind]))


def can_read_direct(paths: Iterable[Path]) -> bool:
    """Return whether the file systems of `paths` read past the page cache (open(2), O_DIRECT)."""
    with mmap.mmap(-1, _ALIGNMENT) as memory:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                return False
            try:
                os.preadv(descriptor, [memory], 0)
            except OSError:
                return False
            finally:
                os.close(descriptor)
    return True


def raw_blocks(checkpoint: Checkpoint, block_bytes: int) -> tuple[RawBlock, ...]:
    """Return the bytes of all tensors as blocks in order of files and offsets; adjacent ranges are merged."""
    ranges: list[tuple[str, int, int]] = []
    for span in sorted(span for tensor in checkpoint.stored.values() for span in spans_of(tensor)):
        if ranges and ranges[-1][0] == span.file and ranges[-1][2] >= span.start:
            file, start, stop = ranges.pop()
            ranges.append((file, start, max(stop, span.stop)))
        else:
            ranges.append((span.file, span.start, span.stop))
    blocks, position = [], 0
    for file, begin, end in ranges:
        for start in range(begin, end, block_bytes):
            stop = min(start + block_bytes, end)
            blocks.append(RawBlock(checkpoint.root / file, start, stop, position))
            position += stop - start
    return tuple(blocks)


def raw_read(way: RawRead, checkpoint: Checkpoint) -> object:
    """Read the bytes of all tensors of `checkpoint`; return what holds them, for the caller to release.

    Raises:
        OSError: a file could not be opened, or read to the end.
    """
    read = {RawKind.MEMORY: _read_to_memory, RawKind.MAP: _map, RawKind.DISK: _read_from_disk}[way.kind]
    return read(checkpoint, way.threads)


def _read_to_memory(checkpoint: Checkpoint, threads: int) -> object:
    blocks = raw_blocks(checkpoint, _BLOCK_BYTES)
    memory = _fresh(max(sum(block.stop - block.start for block in blocks), 1))
    view = memoryview(memory)
    with ExitStack() as opened:
        descriptors = _opened(blocks, os.O_RDONLY, opened)

        def read(block: RawBlock) -> None:
            room = view[block.position : block.position + block.stop - block.start]
            start = block.start
            while room:
                count = _checked(os.preadv(descriptors[block.file], [room], start), block.file, start)
                room, start = room[count:], start + count

        _share(read, blocks, threads)
    return view


def _map(checkpoint: Checkpoint, threads: int) -> object:
    blocks = raw_blocks(checkpoint, _BLOCK_BYTES)
    maps: dict[Path, mmap.mmap] = {}
    addresses: dict[Path, int] = {}
    for path in dict.fromkeys(block.file for block in blocks):
        with path.open("rb") as file:
            maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        addresses[path] = ctypes.addressof(ctypes.c_char.from_buffer(maps[path]))

    def populate(block: RawBlock) -> None:
        start = block.start // _ALIGNMENT * _ALIGNMENT
        # By ctypes, which releases the GIL; mmap.madvise holds it.
        if _libc.madvise(addresses[block.file] + start, block.stop - start, _MADV_POPULATE_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(block.file))

    _share(populate, blocks, threads)
    return maps


def _read_from_disk(checkpoint: Checkpoint, threads: int) -> object:
    blocks = raw_blocks(checkpoint, _DIRECT_BLOCK_BYTES)
    with ExitStack() as opened:
        descriptors = _opened(blocks, os.O_RDONLY | os.O_DIRECT, opened)
        shares = [blocks[number::threads] for number in range(threads)]

        def read(share: Sequence[RawBlock]) -> None:
            memory = _fresh(_DIRECT_BLOCK_BYTES + 2 * _ALIGNMENT)
            for block in share:
                start = block.start // _ALIGNMENT * _ALIGNMENT
                while start < block.stop:
                    want = -(-(block.stop - start) // _ALIGNMENT) * _ALIGNMENT
                    room = memoryview(memory)[:want]
                    start += _checked(os.preadv(descriptors[block.file], [room], start), block.file, start)
                    if start < block.stop and start % _ALIGNMENT:
                        raise OSError(f"{block.file}: the file ended at byte {start}")

        _share(read, shares, threads)
    return None


def _fresh(num_bytes: int) -> mmap.mmap:
    """Return memory in huge pages: direct reads into ordinary ones can take twice as long."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _opened(blocks: Iterable[RawBlock], flags: int, opened: ExitStack) -> dict[Path, int]:
    descriptors = {}
    for path in dict.fromkeys(block.file for block in blocks):
        descriptors[path] = os.open(path, flags | os.O_CLOEXEC)
        opened.callback(os.close, descriptors[path])
    return descriptors


def _checked(count: int, path: Path, offset: int) -> int:
    if count == 0:
        raise OSError(f"{path}: the file ended at byte {offset}")
    return count


def _share(work: Callable[[_Job], None], jobs: Sequence[_Job], threads: int) -> None:
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(work, jobs):
            pass
