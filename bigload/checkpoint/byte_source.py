"""Byte sources: the protocol by which headers and data are read, local files, and a registry by scheme of location.

A location is a `Path`. `memory:/x/model.safetensors` is one of the scheme `memory` (a `Path` keeps one slash of
`memory://x`); every other location is a local file. A new kind of source is a module with a `ByteSource`, and one call
of `register_scheme`; the sources of bigload itself are modules of `checkpoint/sources/`, imported by the first location
that needs them (`_MODULES`).

How a remote checkpoint is read:
  1. `pin` turns what the user named into a location that always has the same content: a branch of the Hub becomes a
     commit. All locations of the checkpoint are made from the pinned one.
  2. `list_folder` gives the names, sizes and versions of its files, by one request where the service can.
  3. `open` and `read_into` read byte ranges, from several threads.
  4. `identity` says what is there now. A plan, a load or a journal compares it with what was there before.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from bigload.descriptors import MAX_BUFFERS, READING_AT_ONCE, read_at
from bigload.errors import ReadError
from bigload.machine.threads.activities import NO_RECORDER, Phase, Recorder
from bigload.units import format_size

ReadRange = Callable[[int, int], bytes]
"""Return the bytes from a start to a stop of a file, all of them. Errors are those of `ByteSource.read_into`."""


class ByteSource(Protocol):
    """An open file of a checkpoint, local or remote, that is read by byte ranges.

    Calls, in order:
      1. Opening: the constructor, or `open` of the source's scheme. It raises `ReadError` if there
         is no such file; it reads nothing, though a remote source may fetch its size.
      2. `read_into`, any number of times, in any order, also from several threads at once, each with ranges and buffers
         of its own. A source may split, coalesce or cache requests.
      3. `close`, once, by the opener, when no thread is in `read_into` any more and also after an error. No other call
         follows.

    Size and version are not asked of an open source but of its location (`SourceScheme.identity`), before the first
    read and after the last: a file that was replaced stays what it was to those who have it open.
    """

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`, one after the other, with the bytes from `offset` on.

        A short read is an error, never a result: the buffers are full when this returns. After an error their content
        is undefined.

        Raises:
            ReadError: the system or the server refused, or the file ended before the buffers were full.
        """

    def close(self) -> None:
        """Release what the source holds."""


class StreamedSource(ByteSource, Protocol):
    """A remote file: each request costs as much time as many bytes, so one should serve many reads."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Take the (start, stop) ranges that the calling thread is about to read, in their order: a hint."""


def expect_reads(source: ByteSource, ranges: Iterable[tuple[int, int]]) -> None:
    """Pass the ranges that the calling thread is about to read to a remote source: a hint."""
    if not isinstance(source, OpenFile) and hasattr(source, "expect"):
        source.expect(ranges)


def read_range(source: ByteSource, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop`, few enough to be copied. Errors are those of `ByteSource.read_into`."""
    content = bytearray(stop - start)
    source.read_into([memoryview(content)], start)
    return bytes(content)


def read_strided(
    source: ByteSource, view: memoryview, *, offset: int, stride: int, run_bytes: int, count: int, apart: int
) -> None:
    """Read `count` runs of `run_bytes`, `stride` apart from `offset` on, into `view`, each `apart` after the last."""
    # A hot loop: positional reads skip the bookkeeping of `read_into`, which takes as long as a cached read.
    descriptor, path = (source.descriptor, source.path) if isinstance(source, PositionalReader) else (-1, "")
    for start in range(0, count * apart, apart):
        run = view[start : start + run_bytes]
        if descriptor < 0 or read_once((run,), descriptor, offset, path) < run_bytes:
            source.read_into([run], offset)
        offset += stride


class OpenFile:
    """A regular file that is open for reading: the base of all sources of local files. `close` may be repeated."""

    def __init__(self, path: Path, *, flags: int = 0, recorder: Recorder = NO_RECORDER) -> None:
        self.path = path
        self._recorder = recorder
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, READING_AT_ONCE | flags)
        except OSError as error:
            hint = "close other files, or allow more (ulimit -n)" if error.errno == errno.EMFILE else None
            raise ReadError(path, error, hint=hint) from error
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise ReadError(path, "not a regular file")

    def close(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PositionalReader(OpenFile):
    """Reads through the page cache by position, from any thread (`read_at`)."""

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Have the kernel start reading these (start, stop) ranges into the page cache, all at once: a hint.

        No others: where it reads 8 MiB ahead, 9 MiB that lie apart would be 16, and take twice the time.
        """
        with suppress(OSError, AttributeError):  # some file systems take no hints, macOS has none
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            for start, stop in ranges:
                os.posix_fadvise(self.descriptor, start, stop - start, os.POSIX_FADV_WILLNEED)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        num_bytes = sum(buffer.nbytes for buffer in buffers)
        with self._recorder.span(Phase.READ, num_bytes=num_bytes, file=self.path.name):
            fill(buffers, self.descriptor, offset, self.path)
        self._recorder.received(num_bytes, file=self.path.name)


def fill(buffers: Sequence[memoryview], descriptor: int, offset: int, path: Path | str) -> None:
    """Fill all of `buffers` from `offset` of an open file, however the system divides the reads."""
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        count = read_once(pending[:MAX_BUFFERS], descriptor, offset, path)
        offset += count
        if count == 0:
            raise ended_early(path, offset, missing=sum(buffer.nbytes for buffer in pending))
        pending = unfilled(pending, count)


def read_once(buffers: Sequence[memoryview], descriptor: int, offset: int, path: Path | str) -> int:
    """Read once, and return how many bytes came: fewer than there is room for, at times, and none past the end."""
    try:
        return read_at(descriptor, buffers, offset)
    except OSError as error:
        raise ReadError(path, f"{error.strerror or error} at byte {offset}") from error


def ended_early(path: Path | str, offset: int, *, missing: int) -> ReadError:
    """Return the error for a file that ended at `offset`, though `missing` bytes more were expected."""
    return ReadError(path, f"the file ended at byte {offset}, {missing} bytes too early")


def unfilled(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of `buffers` when the first `count` bytes of them are filled."""
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []


class SourceIdentity(NamedTuple):
    """Identity of the file at a location: files with equal identities are taken to have the same bytes.

    Attributes:
        num_bytes: Size.
        version: Changes when the content is written to: mtime; commit and ETag. The same on every host.
        local_version: Changes when the file is replaced, and may differ between hosts: inode.
        status_version: Changes with every change of content or status, also with a new link: ctime, which no program
            can set back.
        sha256: Digest of the whole content in hexadecimal, where the service knows it without reading: a file in LFS
            or Xet on the Hub.
    """

    num_bytes: int
    version: tuple[int | str, ...]
    local_version: tuple[int, ...] = ()
    status_version: tuple[int, ...] = ()
    sha256: str | None = None

    @property
    def etag(self) -> str | None:
        """The version in the words of a service; None of a local file."""
        etag = self.version[-1] if self.version else None
        return etag if isinstance(etag, str) and etag else None

    def has_content_of(self, other: SourceIdentity) -> bool:
        """Return whether they are equal but for links and permissions."""
        return self._replace(status_version=other.status_version) == other


class SourceScheme(NamedTuple):
    """Functions that find, identify and open files of one kind of location. Any thread can call them.

    They raise `ReadError` where a file or the service cannot be read (`from` a `FileNotFoundError` where there is no
    such file), `CheckpointNotFoundError` where a service says that there is no such place, and `AccessDeniedError`
    where it refuses this user. Temporary failures are retried before they are raised. No text of an error holds a token
    or a signed address.

    Attributes:
        name: What stands before the colon of a location.
        open: Opens a `ByteSource` that tells the recorder of its reads.
        identity: Returns what is at a location now, without opening it.
        is_local: Whether locations are paths of this machine: direct reads, maps and the page cache apply.
        pin: Returns a location with a fixed version, such as a commit, for one that the user named; itself where there
            are no versions. All other functions but `local_folder` take pinned locations only.
        local_folder: Returns the folder of this machine that has some or all files of a location, without asking the
            service; None if there is none.
        list_folder: Returns the files of a folder and of the folders in it, by their names relative to it (`a/b.json`),
            in no order; an empty mapping if there is no such folder. None for services that cannot list: checkpoints
            are then found by their usual names.
        recent_listing: Returns what `list_folder` returned within the last minutes, also to another process, without
            asking the service; None where nothing is known.
        has_strong_versions: Whether files of equal location and identity have equal bytes for good (commit and ETag),
            so that headers are kept on disk and read only once.
        check_available: Raises ReadError if files of a folder, by their names in it, cannot be opened now: in offline
            mode, those that no cache has. Sends nothing.
        server_without_ranges: Returns the name of the server of a location that is known to send no byte ranges: whole
            files are read. None for others.
    """

    name: str
    open: Callable[[Path, Recorder], ByteSource]
    identity: Callable[[Path], SourceIdentity]
    is_local: bool = False
    pin: Callable[[Path], Path] = lambda location: location
    local_folder: Callable[[Path], Path | None] = lambda _location: None
    list_folder: Callable[[Path], Mapping[str, SourceIdentity]] | None = None
    recent_listing: Callable[[Path], Mapping[str, SourceIdentity] | None] = lambda _location: None
    has_strong_versions: bool = False
    check_available: Callable[[Path, Collection[str]], None] = lambda _folder, _names: None
    server_without_ranges: Callable[[Path], str | None] = lambda _location: None


def address_text(location: Path) -> str:
    """Return a location in the form for people, which `open_checkpoint` takes: `hf://org/model@…/sub`."""
    return str(location).replace(":/", "://", 1)


class WholeFilesWarning(UserWarning):
    """A server sends no byte ranges, so more is transferred than is needed."""


def warn_of_server_without_ranges(server: str, *, file_bytes: int = 0, needed_bytes: int = 0) -> None:
    """Warn that files of `file_bytes` are read whole, once for each server."""
    if server not in _WARNED:
        _WARNED.add(server)
        read, needed = format_size(file_bytes), format_size(needed_bytes)
        more = f" for {needed} needed" if needed != read else ""
        sizes = f" ({read}{more})" if file_bytes else ""
        text = f"{server} does not support byte ranges: whole files are read{sizes}"
        warnings.warn(text, WholeFilesWarning, stacklevel=3)


def register_scheme(scheme: SourceScheme) -> None:
    """Have locations that begin with `scheme.name` and a colon read by `scheme`; a later one replaces an earlier."""
    _SCHEMES[scheme.name] = scheme


def scheme_of(location: Path) -> SourceScheme:
    """Return the scheme of `location`: `file` where it begins with the name of no other, nor of one of fsspec."""
    name, separator, _ = str(location).partition(":/")
    if not separator or not _NAME.fullmatch(name):
        return _FILE
    if name not in _SCHEMES:
        if name in _MODULES:
            schemes = import_module(_MODULES[name]).SCHEMES
        else:
            scheme = import_module("bigload.checkpoint.sources.fsspec_files").scheme_named(name)
            schemes = () if scheme is None else (scheme,)
        for scheme in schemes:
            _SCHEMES.setdefault(scheme.name, scheme)
    return _SCHEMES.get(name, _FILE)


def _file_identity(path: Path) -> SourceIdentity:
    try:
        status = path.stat()
    except OSError as error:
        raise ReadError(path, error) from error
    return SourceIdentity(
        num_bytes=status.st_size,
        version=(status.st_mtime_ns,),
        local_version=(status.st_ino,),
        status_version=(status.st_ctime_ns,),
    )


_FILE = SourceScheme(
    name="file",
    open=lambda path, recorder: PositionalReader(path, recorder=recorder),
    identity=_file_identity,
    is_local=True,
)
_NAME = re.compile(r"[a-z][a-z0-9+.-]+")
_SCHEMES = {_FILE.name: _FILE}
_WARNED = set[str]()
_MODULES = {
    "hf": "bigload.checkpoint.sources.hub",
    "http": "bigload.checkpoint.sources.http",
    "https": "bigload.checkpoint.sources.http",
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"), "bigload.checkpoint.sources.object_stores"),
}
"""Modules that have the schemes of a name as `SCHEMES`. They are imported when a location of theirs is read."""
