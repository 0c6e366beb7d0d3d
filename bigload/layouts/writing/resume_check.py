"""Check of the files that an interrupted run left: how much of each is on the disk as the journal says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bigload.checkpoint.records.manifest import FileRecord
from bigload.errors import ReadError
from bigload.layouts.output import OutputFile
from bigload.layouts.verification.digests import FileDigest
from bigload.layouts.verification.stored_pieces import Pieces, open_pieces
from bigload.layouts.writing.journal import FileProgress
from bigload.loading.progress import Tally
from bigload.machine.threads.inflight_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReusableFile:
    """The part of a file that can be kept.

    Attributes:
        digest: Digest of its beginning, up to `digest.position`.
        record: Its record, if that is all of it.
        windows: Digests of byte ranges behind that, by start and stop.
    """

    digest: FileDigest
    record: FileRecord | None
    windows: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return self.digest.position + sum(stop - start for start, stop in self.windows)

    @property
    def stop(self) -> int:
        """End of the last of them."""
        return max((self.digest.position, *(stop for _, stop in self.windows)))


def recheck(
    folder: Path, output: OutputFile, progress: FileProgress, *, block_bytes: int, tally: Tally
) -> ReusableFile | None:
    """Read back what `progress` lists of `output` below `folder`; return `None` if nothing of it can be kept.

    Everything up to the last digest that matches is kept: of a tensor, if those of all before it are listed, or of all
    bytes up to a position.
    """
    path = folder / output.file
    try:
        size = path.lstat().st_size if not path.is_symlink() else -1
        if size < output.header_bytes:
            return None
        if progress.is_complete and size != output.num_bytes:
            progress = FileProgress(tensors=progress.tensors, prefixes=progress.prefixes)
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
        windows = _good_windows(output, progress, pieces, size, tally, behind=0)
        return ReusableFile(digest=digest, record=None, windows=windows) if windows else None
    good = digest.mark()
    digest.update(memoryview(header))
    if not progress.windows:  # else the header is part of one
        good = digest.mark()
    for stop, name, noted in sorted(_noted(output, progress)):
        start = digest.position
        if not start <= stop <= min(size, output.num_bytes):
            break
        for position, piece in pieces(start, stop):
            digest.skip_to(position)
            digest.update(piece)
        digest.skip_to(stop)
        if (digest.tensors.get(name) if name else digest.so_far) != noted:
            break
        tally.add(stop - start, phase="check", file=output.file)
        good = digest.mark()
    digest.rewind(good)
    is_all_there = progress.is_complete and progress.digest is not None and len(digest.tensors) == len(output.tensors)
    if not is_all_there or digest.finish() != progress.digest:
        windows = _good_windows(output, progress, pieces, size, tally, behind=digest.position)
        return ReusableFile(digest=digest, record=None, windows=windows)
    tensors = {} if output.is_copy else dict(digest.tensors)
    record = FileRecord(num_bytes=output.num_bytes, digest=progress.digest, tensors=tensors)
    return ReusableFile(digest=digest, record=record)


def _good_windows(
    output: OutputFile, progress: FileProgress, pieces: Pieces, size: int, tally: Tally, *, behind: int
) -> dict[tuple[int, int], str]:
    """Return the noted byte ranges from `behind` on that are on the disk."""
    good: dict[tuple[int, int], str] = {}
    for (start, stop), noted in sorted(progress.windows.items()):
        if start < behind or stop > min(size, output.num_bytes):
            continue
        found = FileDigest((), stop - start)
        for position, piece in pieces(start, stop):
            found.skip_to(position - start)
            found.update(piece)
        if found.finish() == noted:
            good[start, stop] = noted
            tally.add(stop - start, phase="check", file=output.file)
    return good


def _noted(output: OutputFile, progress: FileProgress) -> Iterator[tuple[int, str, str]]:
    """Yield where a digest is noted, of which tensor (`""` for all bytes up to there), and the digest."""
    yield from ((position, "", digest) for position, digest in progress.prefixes.items())
    if output.is_copy:
        if progress.is_complete and progress.digest is not None:
            yield output.num_bytes, "", progress.digest
        return
    for tensor, start in zip(output.tensors, output.starts(), strict=True):
        if tensor.name not in progress.tensors:
            return
        yield start + tensor.num_bytes, tensor.name, progress.tensors[tensor.name]
