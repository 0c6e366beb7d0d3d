"""Reader of a written file in pieces: from the disk rather than the page cache, without the holes of sparse files.

A remote file is read by responses that go on over many pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path

from bigload.checkpoint.byte_source import ByteSource, OpenFile, PositionalReader, expect_reads, scheme_of
from bigload.checkpoint.shard_headers import REMOTE_READS
from bigload.errors import UnsupportedMethodError
from bigload.layouts.verification.digests import FileDigest
from bigload.loading.readers.direct import DirectReader
from bigload.machine.files.page_cache import evict_pages
from bigload.machine.files.sparse_files import data_extents
from bigload.machine.threads.activities import NO_RECORDER
from bigload.machine.threads.inflight_pool import BlockPool
from bigload.units import MIB

BLOCK_BYTES = 2 * MIB
DEFAULT_THREADS = 4
"""Threads wait for the disk, whatever the number of cores. More were no faster on measured disks, one was slower."""

Pieces = Callable[[int, int], Iterator[tuple[int, memoryview]]]
"""Yields what is stored between two bytes of a file, as positions and bytes; the bytes are valid until the next."""

OpenPieces = Callable[[Path], AbstractContextManager[Pieces]]
"""Opens a file; see `open_pieces`."""


def readers_of(sizes: Sequence[int], threads: int | None, *, is_local: bool = True) -> tuple[int, OpenPieces]:
    """Return how many files of these `sizes` to read at a time, and what opens them.

    A thread has one file at a time; where there are fewer large files than threads, the others read ahead of it.
    """
    wanted = threads or (DEFAULT_THREADS if is_local else REMOTE_READS)
    num_threads = min(wanted, max(len(sizes), 1))
    num_large = sum(size > BLOCK_BYTES for size in sizes)
    # Small files are one block each, and responses of a server come in order: there is nothing to read ahead.
    ahead = max(min(wanted // num_large, DEFAULT_THREADS), 1) if is_local and num_large else 1
    # A job holds the blocks it reads into, and for moments one more, for the uneven end of a file.
    blocks = BlockPool((ahead + 1) * num_threads, block_bytes=min(max(sizes, default=1), BLOCK_BYTES) or 1)
    return num_threads, partial(open_pieces, blocks=blocks, ahead=ahead)


def digest_file(open_file: OpenPieces, place: Path, digest: FileDigest, on_bytes: Callable[[int], object]) -> int:
    """Digest the file at `place`, up to the size that `digest` knows; holes count as zeros. Returns the bytes read.

    `on_bytes` is called with the number of bytes that were digested, a block at a time.
    """

    def skip_to(position: int) -> None:
        while digest.position < position:  # in steps: a hole may take minutes to digest
            num_bytes = min(BLOCK_BYTES, position - digest.position)
            digest.skip_to(digest.position + num_bytes)
            on_bytes(num_bytes)

    read_bytes = 0
    with open_file(place) as pieces:
        for position, piece in pieces(0, digest.num_bytes):
            skip_to(position)
            read_bytes += piece.nbytes
            digest.update(piece)
            on_bytes(piece.nbytes)
        skip_to(digest.num_bytes)
    return read_bytes


@contextmanager
def open_pieces(path: Path, blocks: BlockPool, *, ahead: int = 1) -> Iterator[Pieces]:
    """Open a local or remote file for reading in pieces of one block.

    It takes `ahead` of `blocks`, and for moments one more, for the uneven end of a file. Of more than one, threads of
    their own read those after the one that was yielded.
    """
    with ExitStack() as opened:
        memories = [opened.enter_context(memoryview(opened.enter_context(blocks.lend()))) for _ in range(ahead)]
        reader = opened.enter_context(closing(_opened(path, blocks)))

        def pieces(start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
            expect_reads(reader, [(start, stop)])
            places = _places(reader, start, stop, len(memories[0]))
            if ahead > 1:
                yield from _read_ahead(reader, places, memories)
                return
            for position, num_bytes in places:
                view = memories[0][:num_bytes]
                reader.read_into([view], position)
                yield position, view

        yield pieces


def _places(reader: ByteSource, start: int, stop: int, block_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield position and size of what is stored, in blocks."""
    whole = iter([(start, stop)])
    for begin, end in data_extents(reader.descriptor, start, stop) if isinstance(reader, OpenFile) else whole:
        for position in range(begin, end, block_bytes):
            yield position, min(block_bytes, end - position)


def _read_ahead(
    reader: ByteSource, places: Iterator[tuple[int, int]], memories: Sequence[memoryview]
) -> Iterator[tuple[int, memoryview]]:
    """Yield what is at `places` in their order, while threads read the next ones into the other memories."""
    reads = deque[tuple[int, memoryview, Future[None]]]()
    with ThreadPoolExecutor(len(memories), "bigload-read") as threads:
        try:
            for memory in cycle(memories):
                if len(reads) == len(memories):
                    position, view, read = reads.popleft()
                    read.result()
                    yield position, view
                if (place := next(places, None)) is None:
                    break
                begin, view = place[0], memory[: place[1]]
                reads.append((begin, view, threads.submit(reader.read_into, [view], begin)))
            for position, view, read in reads:
                read.result()
                yield position, view
        finally:  # reads that have begun are waited for: the memory goes back to the pool
            threads.shutdown(cancel_futures=True)


class _UncachedReader(PositionalReader):
    """Reader through the page cache that evicts pages before and after each read."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        evict_pages(self.descriptor, offset, num_bytes)
        super().read_into(buffers, offset)
        evict_pages(self.descriptor, offset, num_bytes)


def _opened(path: Path, blocks: BlockPool) -> ByteSource:
    scheme = scheme_of(path)
    if not scheme.is_local:
        return scheme.open(path, NO_RECORDER)
    try:
        return DirectReader(path, pool=blocks)
    except UnsupportedMethodError:
        return _UncachedReader(path)
