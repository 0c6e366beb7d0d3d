"""Registry of byte sources by the scheme of their location: `file`, and what is registered from outside.

A new kind of source is a module with a `ByteSource`, and one call of `register_scheme`. `memory:/x/model.safetensors`
is a location of the scheme `memory` (a `Path` keeps one slash of `memory://x`); every other location is a local file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from bigload.errors import ReadError
from bigload.loading.readers.byte_source import ByteSource, PositionalReader
from bigload.loading.report import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """What is at a location now: files with equal identities are taken to have the same bytes.

    Attributes:
        num_bytes: Size.
        version: Changes when the content is written to: mtime, an ETag. The same on every host.
        local_version: Changes when the file is replaced, and may differ between hosts: inode.
        status_version: Changes with every change of content or status, also with a new link: ctime, which no program
            can set back.
    """

    num_bytes: int
    version: tuple[int | str, ...]
    local_version: tuple[int, ...] = ()
    status_version: tuple[int, ...] = ()

    def has_content_of(self, other: SourceIdentity) -> bool:
        """Return whether they are equal but for links and permissions."""
        return replace(self, status_version=other.status_version) == other


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceScheme:
    """How files of one kind of location are identified and opened.

    Attributes:
        name: What stands before the colon of a location.
        open: Opens a `ByteSource` that tells the recorder of its reads, or raises `ReadError`.
        identity: Returns what is at a location now, without opening it, or raises `ReadError`.
        is_local: Whether locations are paths of this machine: direct reads, maps and the page cache apply.
    """

    name: str
    open: Callable[[Path, Recorder], ByteSource]
    identity: Callable[[Path], SourceIdentity]
    is_local: bool = False


def register_scheme(scheme: SourceScheme) -> None:
    """Have locations that begin with `scheme.name` and a colon read by `scheme`; a later one replaces an earlier."""
    _SCHEMES[scheme.name] = scheme


def scheme_of(location: Path) -> SourceScheme:
    """Return the scheme of `location`: `file` where it begins with the name of no other."""
    name, separator, _ = str(location).partition(":/")
    return _SCHEMES.get(name, _FILE) if separator else _FILE


def _open_file(path: Path, recorder: Recorder) -> ByteSource:
    return PositionalReader(path, recorder=recorder)


def _file_identity(path: Path) -> SourceIdentity:
    try:
        status = path.stat()
    except OSError as error:
        raise ReadError(path, error.strerror or str(error)) from error
    return SourceIdentity(
        num_bytes=status.st_size,
        version=(status.st_mtime_ns,),
        local_version=(status.st_ino,),
        status_version=(status.st_ctime_ns,),
    )


_FILE = SourceScheme(name="file", open=_open_file, identity=_file_identity, is_local=True)
_SCHEMES = {_FILE.name: _FILE}
