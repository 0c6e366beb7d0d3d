"""Comparison of a resharded folder with its manifest, byte for byte.

Every file is read once, with direct reads where the file system offers them, so that the disk is checked and not the
page cache, and remote files by range requests. One read yields the digests of the file and of its tensors. Holes of
sparse files are digested as zeros without reading. A thread has one file at a time and a block of memory for it; where
there are fewer files than threads, the others read ahead of it.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bigload.checkpoint.byte_source import address_text, scheme_of
from bigload.checkpoint.formats.registry import DCP, format_of, read_shard_header
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.location import locate
from bigload.checkpoint.model import Span, TensorInfo
from bigload.checkpoint.records.delta import DELTA_FILE, read_delta
from bigload.checkpoint.records.manifest import MANIFEST_FILE, FileRecord, Manifest, read_manifest, read_manifest_file
from bigload.dtypes import DTYPES
from bigload.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    DamagedOutputError,
    InvalidCheckpointError,
    ManifestNotFoundError,
    OptionError,
    Problem,
    ReadError,
)
from bigload.layouts.formats.dat import DAT_SUFFIX
from bigload.layouts.verification.digests import FileDigest, ranges_of
from bigload.layouts.verification.stored_pieces import OpenPieces, digest_file, readers_of
from bigload.loading.progress import OnProgress, Tally, ignore_progress
from bigload.loading.settings import MAX_THREADS
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import counted

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".dat")
"""Names that a reader may take for weights: an unknown file with one of them is a warning."""


class Level(StrEnum):
    """Extent of a comparison: `size` compares names and sizes, `full` reads every byte."""

    SIZE = "size"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileProblem(Problem):
    """A difference between a file and the manifest.

    Attributes:
        code: `missing`, `not-a-file`, `unsafe-path`, `size`, `unreadable`, `header`, `tensor`, `bytes`; of a warning,
            `extra`.
        file: By its path inside the folder.
        tensor: Name of the tensor that differs, if it is known.
        start: First byte of the part of the file that holds the difference; `None` where no part is known.
        stop: The byte after that part.
    """

    tensor: str | None = None
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of a comparison.

    Attributes:
        folder: Folder as the caller named it; a remote one with its commit, where it has one.
        manifest: Its manifest.
        level: Extent of the comparison.
        problems: In the order of the manifest's files, and in each in the order of its bytes.
        warnings: Files that the manifest does not name and that readers may take for weights.
        undigested: Files without a digest, because not all of their bytes were read when they were written: only size,
            header and the tensors that have a digest are compared.
        read_bytes: Bytes that were read; holes are not.
        seconds: Duration.
        base_files: Of a delta, files of its base whose tensors were compared too.
    """

    folder: Path
    manifest: Manifest
    level: Level
    problems: tuple[FileProblem, ...]
    warnings: tuple[FileProblem, ...]
    undigested: tuple[str, ...]
    read_bytes: int
    seconds: float
    base_files: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether no difference was found."""
        return not self.problems

    @property
    def num_tensors(self) -> int:
        """Tensors in all files that the manifest names, each time they are stored."""
        return sum(len(record.tensors) for record in self.manifest.files.values())

    def check(self) -> None:
        """Raise unless `ok`.

        Raises:
            DamagedOutputError: with all problems.
        """
        if self.problems:
            files = counted(len({problem.file for problem in self.problems}), "file")
            raise DamagedOutputError(
                self.folder,
                f"{address_text(self.folder)} is not what was written: "
                f"{counted(len(self.problems), 'problem')} in {files}",
                problems=self.problems,
                hint="fetch the named files again, or reshard again from the source",
            )


def verify(
    folder: str | Path,
    *,
    level: Level | str = Level.FULL,
    manifest: str | Path | None = None,
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> VerifyReport:
    """Compare every file of `folder` with its manifest.

    Differences and unreadable files are reported, not raised; see `VerifyReport.check`.

    Args:
        folder: As `reshard` or `fetch` made it, or `write_manifest` found it, wherever it has been moved, copied or
            uploaded to: a folder or a remote location. Of a remote one the files are read by byte ranges, and nothing
            is kept.
        level: `"full"` reads everything, `"size"` looks at names and sizes alone.
        manifest: File of the manifest, where it is not in the folder.
        threads: Number of blocks read at a time; `DEFAULT_THREADS` when left out, 16 of a remote folder.
        on_progress: Called after every digested block.

    Raises:
        ManifestNotFoundError: no such folder, or it has no manifest.
        AccessDeniedError: a service refuses it to this user.
        DamagedOutputError: its manifest is not one.
        OptionError: `level` or `threads` is invalid.
        ReadError: the manifest cannot be read.
    """
    if level not in list(Level):
        raise OptionError.of("level", level, f"one of {', '.join(Level)}")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise OptionError.of("threads", threads, f"a whole number from 1 to {MAX_THREADS}")
    began = time.monotonic()
    root = _located(folder)
    known = read_manifest(root) if manifest is None else read_manifest_file(Path(manifest))
    sizes = [record.num_bytes for record in known.files.values()]
    num_threads, open_file = readers_of(sizes, threads, is_local=scheme_of(root).is_local)
    tally = Tally(known.num_bytes, on_progress)
    checks = {file: _FileCheck(root, file, record, open_file, tally) for file, record in known.files.items()}
    checks |= {
        name: _FileCheck(place, file, record, open_file, Tally(0, ignore_progress), name=name)
        for name, place, file, record in _base_files(root, known)
    }
    look = _FileCheck.size if level == Level.SIZE else _FileCheck.everything
    found: dict[str, tuple[FileProblem, ...]] = {}

    def work(check: _FileCheck) -> None:
        found[check.name] = look(check)

    # The largest first: the last file to end should not be the one that takes longest.
    run_jobs(work, sorted(checks.values(), key=lambda check: -check.record.num_bytes), threads=num_threads)
    return VerifyReport(
        folder=root,
        manifest=known,
        level=Level(level),
        problems=tuple(problem for file in checks for problem in found[file]),
        warnings=tuple(_extra_files(root, known)),
        undigested=tuple(file for file, record in known.files.items() if record.digest is None),
        read_bytes=sum(check.read_bytes for check in checks.values()),
        seconds=time.monotonic() - began,
        base_files=tuple(file for file in checks if file not in known.files),
    )


def _base_files(root: Path, manifest: Manifest) -> Iterator[tuple[str, Path, str, FileRecord]]:
    """Yield name, folder, file and record of what a delta takes from its base; nothing of other folders."""
    if DELTA_FILE not in manifest.files or not scheme_of(root).is_local:
        return
    try:
        delta = read_delta(root)
    except (InvalidCheckpointError, OSError):
        return  # the file itself is listed as damaged
    for shard in delta.shards:
        record = FileRecord(num_bytes=shard.num_bytes, digest=None, tensors=delta.tensors)
        yield f"{delta.base}/{shard.file}", root / delta.base, shard.file, record


def _located(folder: str | Path) -> Path:
    """Return the folder as it was named, or the pinned location of a remote one.

    Caches are not looked for: they may have the weights and not the manifest.
    """
    try:
        return locate(folder, find_cached=False)
    except CheckpointNotFoundError as error:
        reason = error.message.partition(": ")[2] or error.message
        raise ManifestNotFoundError(folder, reason, hint=error.hint) from None


@dataclass(eq=False)
class _FileCheck:
    """Comparison of one file with its record; used by one thread."""

    root: Path
    file: str
    record: FileRecord
    open_file: OpenPieces
    tally: Tally
    name: str = ""
    read_bytes: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or self.file  # a file of a delta's base is called by its path from the delta
        self._left_bytes = self.record.num_bytes
        # What was copied unchanged has a digest as a whole, and none for each tensor.
        # The parts of a distributed checkpoint have none, another file describes them.
        self._has_header = bool(self.record.tensors) and format_of(self.file) not in (None, DCP)

    def size(self) -> tuple[FileProblem, ...]:
        """Return why the file is not there, or not of its size."""
        found = self._found()
        self._count(self._left_bytes)
        return (found,) if isinstance(found, FileProblem) else ()

    def everything(self) -> tuple[FileProblem, ...]:
        """Return what is wrong with the file: its size, or else the parts of it whose digests differ."""
        found = self._found()
        try:
            return (found,) if isinstance(found, FileProblem) else tuple(self._contents(found))
        except AccessDeniedError:
            raise
        except ReadError as error:
            return (self._problem("unreadable", error.message),)
        except OSError as error:
            return (self._problem("unreadable", f"cannot be read: {error.strerror or error}"),)
        finally:
            self._count(self._left_bytes)  # also what was not read, so that progress reaches the total

    def _found(self) -> Path | FileProblem:
        """Return where the file of the right size really is, or why there is none."""
        place = resolve_shard(self.root, self.file)
        if isinstance(place, str):
            return self._problem("unsafe-path", f"not opened, because it {place}")
        expected = self.record.num_bytes
        try:
            found = _stored_bytes(place)
        except AccessDeniedError:
            raise
        except (FileNotFoundError, NotADirectoryError):
            return self._problem("missing", "missing")
        except OSError as error:
            return self._problem("unreadable", f"cannot be read: {error.strerror or error}")
        if found is None:
            return self._problem("not-a-file", "not a regular file")
        if found != expected:
            change = "cut off" if found < expected else "too long"
            start, stop = sorted((found, expected))
            return self._problem("size", f"{change}: {found} bytes, expected {expected}", start=start, stop=stop)
        return place

    def _contents(self, place: Path) -> list[FileProblem]:
        try:
            tensors = self._tensors(place)
        except InvalidCheckpointError as error:
            return [self._problem("header", problem.text) for problem in error.problems]
        problems = list(self._other_names(tensors))
        if self.record.digest is None and not any(self.record.tensors.values()):
            return problems
        ranges, same = ranges_of(tensors.values())
        digest = FileDigest(ranges, self.record.num_bytes)
        self.read_bytes = digest_file(self.open_file, place, digest, self._count)
        for name, (_, start, stop) in ((name, tensors[name].span) for name in same):
            if self.record.tensors.get(name) not in (None, digest.tensors[same[name]]):
                text = f"tensor {name!r} differs, somewhere in bytes {start} to {stop}"
                problems.append(self._problem("tensor", text, tensor=name, start=start, stop=stop))
        if self.record.digest not in (None, digest.finish()) and not problems:
            problems.append(self._elsewhere(tensors))
        return problems

    def _tensors(self, place: Path) -> Mapping[str, TensorInfo]:
        """Return the tensors of the file, in the order of bytes, as it says itself; none where nothing says it.

        Raises:
            InvalidCheckpointError, OSError: its header is not one, or cannot be read.
        """
        if self._has_header:
            return read_shard_header(place, self.file).tensors
        if len(self.record.tensors) == 1 and self.file.endswith(DAT_SUFFIX):  # a file of bare bytes
            num_bytes = self.record.num_bytes
            name = next(iter(self.record.tensors))
            return {name: TensorInfo(name, DTYPES["U8"], (num_bytes,), Span(self.file, 0, num_bytes))}
        return {}

    def _other_names(self, tensors: Mapping[str, TensorInfo]) -> Iterator[FileProblem]:
        """Yield a problem if the header names other tensors than were written."""
        is_whole = self._has_header and self.name == self.file
        differing = tensors.keys() ^ self.record.tensors.keys() if is_whole else ()
        if differing:
            name = min(differing)
            place = "has" if name in tensors else "lacks"
            yield self._problem("header", f"its header names other tensors than were written: it {place} {name!r:.200}")

    def _elsewhere(self, tensors: Mapping[str, TensorInfo]) -> FileProblem:
        """Return the problem for a difference outside of all tensors."""
        if not self._has_header or not self.file.endswith(".safetensors"):
            where = "outside of its tensors" if tensors else ""
            return self._problem("bytes", f"its bytes differ {where}".rstrip(), start=0, stop=self.record.num_bytes)
        stop = min((tensor.span.start for tensor in tensors.values()), default=self.record.num_bytes)
        return self._problem("header", f"its header differs, somewhere in bytes 0 to {stop}", start=0, stop=stop)

    def _count(self, num_bytes: int) -> None:
        self._left_bytes -= num_bytes
        self.tally.add(num_bytes, phase="verify", file=self.file)

    def _problem(
        self, code: str, text: str, *, tensor: str | None = None, start: int | None = None, stop: int | None = None
    ) -> FileProblem:
        return FileProblem(code=code, file=self.name, text=text, tensor=tensor, start=start, stop=stop)


def _stored_bytes(place: Path) -> int | None:
    """Return the size of the file at a local or pinned location; None of what is no regular file."""
    scheme = scheme_of(place)
    if scheme.is_local:
        status = place.stat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    try:
        return scheme.identity(place).num_bytes
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise


def _extra_files(root: Path, manifest: Manifest) -> Iterator[FileProblem]:
    """Yield files of weights that the manifest does not name; links to folders are not followed."""
    for file in _listed(root):
        if file.endswith(_WEIGHTS) and file not in manifest.files:
            yield FileProblem(code="extra", file=file, text=f"not named in {MANIFEST_FILE}, and not compared")


def _listed(root: Path) -> Iterator[str]:
    """Yield the files in a folder and in its folders, in order; none of a service that cannot list them."""
    scheme = scheme_of(root)
    if not scheme.is_local:
        yield from sorted(scheme.list_folder(root) if scheme.list_folder else ())
        return
    for folder, folders, names in os.walk(root):
        folders.sort()
        for name in sorted(names):
            yield (Path(folder) / name).relative_to(root).as_posix()
