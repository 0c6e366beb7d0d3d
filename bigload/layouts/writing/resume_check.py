"""Check of the files that an interrupted run left: how much of each is on the disk as the journal says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bigload.checkpoint.byte_source import PositionalReader
from bigload.errors import ReadError
from bigload.layouts.output import OutputFile
from bigload.layouts.verification.digests import FileDigest
from bigload.layouts.verification.manifest import FileRecord
from bigload.layouts.writing.journal import FileProgress
from bigload.loading.progress import Tally
from bigload.loading.readers.direct import DirectReader, direct_alignment
from bigload.machine.inflight_pool import BlockPool
from bigload.machine.sparse_files import data_extents


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableFile:
    """The part of a file that can be kept: its digest up to `digest.position`, and its record if that is all of it."""

    digest: FileDigest
    record: FileRecord | None


def recheck(
    folder: Path, output: OutputFile, progress: FileProgress, *, pool: BlockPool, tally: Tally
) -> ReusableFile | None:
    """Read back what `progress` lists of `output` below `folder`; return `None` if nothing of it can be kept.

    Everything up to the first tensor that is missing or differs is kept.
    """
    path = folder / output.file
    try:
        size = path.lstat().st_size if not path.is_symlink() else -1
        if size < output.header_bytes:
            return None
        if progress.is_complete and size != output.num_bytes:
            progress = FileProgress(tensors=progress.tensors)
        with _reader(path, pool) as reader, pool.lend() as block, memoryview(block) as view:
            return _compared(output, progress, _StoredBytes(reader, view, size), tally)
    except (ReadError, OSError):
        return None  # what cannot be read is written again


def _compared(output: OutputFile, progress: FileProgress, content: _StoredBytes, tally: Tally) -> ReusableFile | None:
    digest = FileDigest.of(output)
    header = bytearray()
    for chunk in content.read(0, output.header_bytes):
        header += chunk
        digest.update(chunk)
    if header != output.header:
        return None
    good = digest.mark()
    for tensor in output.tensors:
        noted = progress.tensors.get(tensor.name)
        start, stop = digest.position, digest.position + tensor.num_bytes
        if noted is None or stop > content.size:
            break
        for chunk in content.read(start, stop):
            digest.update(chunk)
        digest.skip_to(stop)
        if digest.tensors.get(tensor.name) != noted:
            break
        tally.add(tensor.num_bytes, phase="check", file=output.file)
        good = digest.mark()
    digest.rewind(good)
    return ReusableFile(digest=digest, record=_record(output, progress, digest))


def _record(output: OutputFile, progress: FileProgress, digest: FileDigest) -> FileRecord | None:
    is_all_there = progress.is_complete and progress.digest is not None and len(digest.tensors) == len(output.tensors)
    if not is_all_there or digest.finish() != progress.digest:
        return None
    tensors: Mapping[str, str | None] = dict(digest.tensors)
    return FileRecord(num_bytes=output.num_bytes, digest=progress.digest, tensors=tensors)


def _reader(path: Path, pool: BlockPool) -> PositionalReader | DirectReader:
    if direct_alignment(path) is None:
        return PositionalReader(path)
    # Not from `pool`, of which a block is held while this reads: a pool of one would never lend another.
    return DirectReader(path, pool=BlockPool(1, block_bytes=pool.block_bytes))


class _StoredBytes:
    """Reader of a file in pieces of one block of memory, without its holes."""

    def __init__(self, reader: PositionalReader | DirectReader, block: memoryview, size: int) -> None:
        self.size = size
        self._reader = reader
        self._block = block

    def read(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes up to the last stored one; a hole follows. A hole in front is read as zeros."""
        last = start
        for _, end in data_extents(self._reader.descriptor, start, stop):
            last = end
        while start < last:
            view = self._block[: min(len(self._block), last - start)]
            self._reader.read_into([view], start)
            yield view
            start += len(view)
