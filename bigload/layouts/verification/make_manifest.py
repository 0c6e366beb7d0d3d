"""Manifest of a checkpoint that is there already, downloaded or trained: every file is read once and digested.

What the Hub says of downloaded files is compared on the way. Nothing but the manifest is written, as a whole or not at
all. It is an integrity check: it says what the files were when it was made, and not who made them.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from bigload.checkpoint.byte_source import address_text, scheme_of
from bigload.checkpoint.formats.registry import DCP, LegacyFileError, format_of, read_shard_header
from bigload.checkpoint.index import resolve_shard
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.records.fingerprint import fingerprint
from bigload.checkpoint.records.manifest import (
    MANIFEST_FILE,
    STAGING_SUFFIX,
    FileRecord,
    Manifest,
    ManifestSource,
    manifest_lines,
    read_manifest,
    read_manifest_file,
)
from bigload.checkpoint.source import open_checkpoint
from bigload.documents import PATH_ERRORS, atomic_file
from bigload.errors import (
    DamagedOutputError,
    InvalidCheckpointError,
    ManifestNotFoundError,
    OptionError,
    OutputExistsError,
    Problem,
    ReadError,
    UnsupportedFormatError,
    WriteError,
)
from bigload.layouts.verification.digests import FileDigest, TensorRange, ranges_of
from bigload.layouts.verification.hub_versions import HubVersion, hub_versions
from bigload.layouts.verification.stored_pieces import OpenPieces, digest_file, readers_of
from bigload.loading.progress import OnProgress, Tally, ignore_progress
from bigload.loading.settings import MAX_THREADS
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import counted
from bigload.version import __version__

LAYOUT = "files"
"""Of a folder that no reshard made; a fetch of whole files has it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport:
    """Result of making a manifest.

    Attributes:
        path: File of the manifest.
        folder: Folder that it describes.
        manifest: What it says.
        compared: Files whose digest is the one by which the Hub knows them.
        is_written: Whether the file was written; an equal one was there already otherwise.
        read_bytes: Bytes that were read; holes are not.
        seconds: Duration.
    """

    path: Path
    folder: Path
    manifest: Manifest
    compared: tuple[str, ...]
    is_written: bool
    read_bytes: int
    seconds: float


def write_manifest(
    folder: Checkpoint | str | Path,
    out: str | Path | None = None,
    *,
    force: bool = False,
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> ManifestReport:
    """Write the manifest of the checkpoint in `folder`, with the digests that its files and tensors have now.

    `verify` compares with it later, and `load(verify=True)` while it reads. Files that came from the Hugging Face Hub
    are compared with the digests that its cache, `hf download --local-dir` or `fetch` noted. Hidden files and folders
    are left out.

    Args:
        folder: Folder of a checkpoint on this machine, or one that was opened there.
        out: File to write; `bigload-manifest.json` in the folder when left out.
        force: Replace a manifest that describes other files.
        threads: Number of blocks read at a time; 4 when left out.
        on_progress: Called after every digested block.

    Raises:
        CheckpointError: no checkpoint, or one with damaged headers.
        UnsupportedFormatError: it is not a folder of this machine.
        OutputExistsError: a manifest is there that describes other files.
        DamagedOutputError: files are not what the Hub has.
        ReadError: a file cannot be read, or was written to meanwhile.
        WriteError: the manifest cannot be written there; found out before anything is read.
    """
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise OptionError.of("threads", threads, f"a whole number from 1 to {MAX_THREADS}")
    began = time.monotonic()
    checkpoint = folder if isinstance(folder, Checkpoint) else open_checkpoint(folder)
    root = checkpoint.root
    if not scheme_of(root).is_local or Path(checkpoint.path).expanduser().is_file():
        hint = f"bigload fetch {address_text(root)} makes one" if not scheme_of(root).is_local else f"name {root}"
        raise UnsupportedFormatError(checkpoint.path, "a manifest is made of a folder on this machine", hint=hint)
    target = root / MANIFEST_FILE if out is None else Path(out).expanduser()
    _check_writable(target, is_in_folder=out is None)
    before = None if force else _manifest_before(root, target, is_in_folder=out is None)
    files = {file: _place_of(root, file) for file in _files_of(checkpoint) if root / file != target}
    states = {file: place.stat() for file, place in files.items()}
    versions = hub_versions(root, files, before)
    num_threads, open_file = readers_of([state.st_size for state in states.values()], threads)
    tally = Tally(sum(state.st_size for state in states.values()), on_progress)
    digests = {
        file: _FileToDigest(checkpoint, file, place, states[file].st_size, versions.get(file))
        for file, place in files.items()
    }
    run_jobs(
        lambda each: each.read(open_file, tally),
        sorted(digests.values(), key=lambda each: -each.num_bytes),
        threads=num_threads,
    )
    for file, place in files.items():
        now = place.stat()
        if (now.st_size, now.st_mtime_ns) != (states[file].st_size, states[file].st_mtime_ns):
            raise ReadError(place, "it was written to while it was read; no manifest was written")
    if problems := [each.problem for each in digests.values() if each.problem is not None]:
        raise DamagedOutputError(
            root,
            f"{root} is not what the Hub has: {counted(len(problems), 'file')} with another digest",
            problems=problems,
            hint="fetch the named files again; no manifest was written",
        )
    records = {file: each.record() for file, each in digests.items()}
    manifest = Manifest(
        layout=LAYOUT,
        files=records,
        aliases={},
        source=ManifestSource(path=checkpoint.path, total_bytes=checkpoint.total_bytes, shards=fingerprint(checkpoint)),
        version=__version__,
        options={"versions": {file: [each.commit, each.etag] for file, each in versions.items()}} if versions else {},
    )
    if before is not None:
        manifest = _extended(before, manifest, target)
    newest = max((state.st_mtime_ns for state in states.values()), default=0)
    is_written = manifest != before or target.stat().st_mtime_ns < newest  # it says now that they are the same
    if is_written:
        _write(manifest, target)
    return ManifestReport(
        path=target,
        folder=root,
        manifest=manifest,
        compared=tuple(file for file in files if file in versions),
        is_written=is_written,
        read_bytes=sum(each.read_bytes for each in digests.values()),
        seconds=time.monotonic() - began,
    )


@dataclass(eq=False)
class _FileToDigest:
    """One file and its digests; used by one thread."""

    checkpoint: Checkpoint
    file: str
    place: Path
    num_bytes: int
    version: HubVersion | None
    read_bytes: int = 0

    def __post_init__(self) -> None:
        ranges, self._names = _tensors_of(self.checkpoint, self.file, self.place)
        service = None if self.version is None else self.version.new_hash(self.num_bytes)
        self._digest = FileDigest(ranges, self.num_bytes, service=service)
        self._whole = ""

    def read(self, open_file: OpenPieces, tally: Tally) -> None:
        try:
            self.read_bytes = digest_file(
                open_file, self.place, self._digest, lambda done: tally.add(done, phase="verify", file=self.file)
            )
        except OSError as error:
            if isinstance(error, ReadError):
                raise
            raise ReadError(self.place, error) from error
        self._whole = self._digest.finish()

    def record(self) -> FileRecord:
        tensors = {name: self._digest.tensors.get(first or "") for name, first in self._names.items()}
        return FileRecord(num_bytes=self.num_bytes, digest=self._whole, tensors=tensors)

    @property
    def problem(self) -> Problem | None:
        """Difference from what the Hub has, if any."""
        if self.version is None or self._digest.by_service == self.version.etag:
            return None
        text = f"its {self.version.digest_name} is {self._digest.by_service}, the Hub's is {self.version.etag}"
        return Problem(code="hub-digest", file=self.file, text=text)


def _tensors_of(checkpoint: Checkpoint, file: str, place: Path) -> tuple[list[TensorRange], Mapping[str, str | None]]:
    """Return where the tensors of a file are, and by their names the one that is in these bytes; None for overlaps."""
    form = format_of(file)
    if form is None or form is DCP:
        return [], {}
    try:
        tensors = read_shard_header(place, file).tensors
    except (InvalidCheckpointError, LegacyFileError):
        if file in {shard.file for shard in checkpoint.shards}:
            raise
        return [], {}  # such as the state of an optimizer
    ranges, same = ranges_of(tensors.values())
    return ranges, {name: same.get(name) for name in tensors}


def _files_of(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the files in the folder of a checkpoint and in its folders; hidden ones only if the checkpoint needs them.

    Links to folders are not followed.
    """
    needed = {shard.file for shard in checkpoint.shards} | {checkpoint.index_file}
    for folder, folders, names in os.walk(checkpoint.root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not name.endswith(STAGING_SUFFIX))
        for name in sorted(names):
            path = Path(folder) / name
            file = path.relative_to(checkpoint.root).as_posix()
            is_wanted = file in needed or not name.startswith(".")
            if is_wanted and file != MANIFEST_FILE and (path.is_file() or path.is_symlink()):
                yield file


def _place_of(root: Path, file: str) -> Path:
    """Return where a file really is."""
    place = resolve_shard(root, file)
    reason = place if isinstance(place, str) else None if place.is_file() else "is a link to no regular file"
    if reason is not None or isinstance(place, str):
        raise InvalidCheckpointError(root, [Problem(code="unsafe-path", file=file, text=f"it {reason}")])
    return place


def _manifest_before(root: Path, target: Path, *, is_in_folder: bool) -> Manifest | None:
    """Return the manifest that is there; None without one."""
    with suppress(ManifestNotFoundError):
        try:
            return read_manifest(root) if is_in_folder else read_manifest_file(target)
        except DamagedOutputError as error:
            hint = "choose another name" if not is_in_folder else "--force (force=True) replaces it"
            raise OutputExistsError(target, error.message, hint=hint) from error
    return None


def _extended(before: Manifest, found: Manifest, target: Path) -> Manifest:
    """Return the manifest `before` with the digests that it lacks."""
    differing = list(_differing(before, found))
    if differing:
        error = OutputExistsError(
            target,
            f"it describes other files: {counted(len(differing), 'difference')}",
            hint="bigload verify lists what is damaged; --force (force=True) describes the files as they are now",
        )
        error.details = tuple(differing)
        raise error
    records = {
        file: replace(
            record,
            digest=found.files[file].digest,
            tensors={**found.files[file].tensors, **{name: one for name, one in record.tensors.items() if one}},
        )
        for file, record in before.files.items()
    }
    return replace(before, files=records)


def _differing(before: Manifest, found: Manifest) -> Iterator[str]:
    for file in sorted(before.files.keys() | found.files.keys()):
        then, now = before.files.get(file), found.files.get(file)
        if then is None or now is None:
            yield f"{file}: {'not in the manifest' if then is None else 'gone'}"
        elif then.num_bytes != now.num_bytes:
            yield f"{file}: {now.num_bytes} bytes, the manifest says {then.num_bytes}"
        elif then.digest not in (None, now.digest) or any(
            digest is not None and now.tensors.get(name, digest) != digest for name, digest in then.tensors.items()
        ):
            yield f"{file}: other bytes than the manifest says"


def _check_writable(target: Path, *, is_in_folder: bool) -> None:
    """Raise WriteError if the system will refuse, before hours of reading."""
    folder = target.parent
    if target.is_dir():
        raise WriteError(target, IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)), hint="name a file")
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return
    number = errno.EACCES if folder.is_dir() else errno.ENOENT
    hint = "-o FILE (out=) writes it elsewhere, and bigload verify DIR --manifest FILE reads it there"
    raise WriteError(target, OSError(number, os.strerror(number)), hint=hint if is_in_folder else None)


def _write(manifest: Manifest, target: Path) -> None:
    lines = (line.encode(errors=PATH_ERRORS) for line in manifest_lines(manifest))
    with atomic_file(target) as place:
        if isinstance(place, Path):
            with place.open("wb") as file:
                file.writelines(lines)
        else:
            place.writelines(lines)
