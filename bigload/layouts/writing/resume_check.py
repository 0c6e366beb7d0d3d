"""Check of the files that an interrupted run left: how much of each is on the disk as the journal says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bigload.errors import ReadError
from bigload.layouts.output import OutputFile
from bigload.layouts.verification.digests import FileDigest
from bigload.layouts.verification.manifest import FileRecord
from bigload.layouts.verification.stored_pieces import Pieces, open_pieces
from bigload.layouts.writing.journal import FileProgress
from bigload.loading.progress import Tally
from bigload.machine.inflight_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableFile:
    """The part of a file that can be kept: its digest up to `digest.position`, and its record if that is all of it."""

    digest: FileDigest
    record: FileRecord | None


def recheck(
    folder: Path, output: OutputFile, progress: FileProgress, *, block_bytes: int, tally: Tally
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
        with open_pieces(path, BlockPool(2, block_bytes=block_bytes)) as pieces:
            return _compared(output, progress, pieces, size, tally)
    except (ReadError, OSError):
        return None  # what cannot be read is written again


def _compared(
    output: OutputFile, progress: FileProgress, pieces: Pieces, size: int, tally: Tally
) -> ReusableFile | None:
    digest = FileDigest.of(output)
    header = bytearray(output.header_bytes)
    for position, piece in pieces(0, len(header)):
        header[position : position + len(piece)] = piece
    if header != output.header:
        return None
    digest.update(memoryview(header))
    good = digest.mark()
    for tensor in output.tensors:
        noted = progress.tensors.get(tensor.name)
        start, stop = digest.position, digest.position + tensor.num_bytes
        if noted is None or stop > size:
            break
        for position, piece in pieces(start, stop):
            digest.skip_to(position)
            digest.update(piece)
        digest.skip_to(stop)
        if digest.tensors.get(tensor.name) != noted:
            break
        tally.add(tensor.num_bytes, phase="check", file=output.file)
        good = digest.mark()
    digest.rewind(good)
    is_all_there = progress.is_complete and progress.digest is not None and len(digest.tensors) == len(output.tensors)
    if not is_all_there or digest.finish() != progress.digest:
        return ReusableFile(digest=digest, record=None)
    record = FileRecord(num_bytes=output.num_bytes, digest=progress.digest, tensors=dict(digest.tensors))
    return ReusableFile(digest=digest, record=record)
