"""Reader of a written file in pieces: from the disk rather than the page cache, without the holes of sparse files.

A remote file is read by responses that go on over many pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from bigload.checkpoint.byte_source import ByteSource, OpenFile, PositionalReader, expect_reads, scheme_of
from bigload.errors import UnsupportedMethodError
from bigload.loading.readers.direct import DirectReader
from bigload.machine.activities import NO_RECORDER
from bigload.machine.inflight_pool import BlockPool
from bigload.machine.sparse_files import data_extents

Pieces = Callable[[int, int], Iterator[tuple[int, memoryview]]]
"""Yields what is stored between two bytes of a file, as positions and bytes; the bytes are valid until the next."""


@contextmanager
def open_pieces(path: Path, blocks: BlockPool) -> Iterator[Pieces]:
    """Open the file at `path` for reading in pieces of one block.

    Args:
        path: The file, local or remote.
        blocks: Memory; takes one block, and for moments one more, for the uneven end of a file.

    Raises:
        ReadError: the file cannot be opened or read.
    """
    with blocks.lend() as block, memoryview(block) as memory, closing(_opened(path, blocks)) as reader:

        def pieces(start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
            expect_reads(reader, [(start, stop)])
            whole = iter([(start, stop)])
            for begin, end in data_extents(reader.descriptor, start, stop) if isinstance(reader, OpenFile) else whole:
                for position in range(begin, end, len(memory)):
                    view = memory[: min(len(memory), end - position)]
                    reader.read_into([view], position)
                    yield position, view

        yield pieces


class _UncachedReader(PositionalReader):
    """Reader through the page cache that evicts pages before and after each read."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)
        super().read_into(buffers, offset)
        os.posix_fadvise(self.descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _opened(path: Path, blocks: BlockPool) -> ByteSource:
    scheme = scheme_of(path)
    if not scheme.is_local:
        return scheme.open(path, NO_RECORDER)
    try:
        return DirectReader(path, pool=blocks)
    except UnsupportedMethodError:
        return _UncachedReader(path)
