"""Locations that fsspec knows (`memory://`, `sftp://host/folder`, `smb://` ...), and object stores without obstore.

Credentials are those that each file system of fsspec finds by itself, or in the configuration of fsspec. fsspec has no
conditional reads: a file that changes is noticed by its size and by the version that `info` gives (ETag, or times).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any
from urllib.parse import urlsplit

from bigload.checkpoint.byte_source import SourceIdentity, SourceScheme, address_text, ended_early
from bigload.checkpoint.sources.http_requests import plain_etag
from bigload.checkpoint.sources.ranged_source import RangedSource, missing, translated
from bigload.checkpoint.sources.store_hints import STORES, connection_hint, credentials_hint, refusal_hint
from bigload.errors import (
    AccessDeniedError,
    BigloadError,
    CheckpointError,
    CheckpointNotFoundError,
    MissingPackageError,
    ReadError,
)
from bigload.machine.threads.activities import Recorder
from bigload.units import MIB

_CHUNK_BYTES = 16 * MIB
"""fsspec returns a range as one object: this many bytes are in memory at once per thread."""

_VERSION_KEYS = (
    *("ETag", "etag", "e_tag", "generation", "md5Hash", "content_md5", "checksum", "sha256"),
    *("mtime", "LastModified", "last_modified", "modified", "updated", "created"),
)
_THREAD_SAFE = ("memory", "local")
_CLIENT_HINT = "give the client of this service credentials, as its documentation says"


class FsspecSource(RangedSource):
    """A file that is read by `cat_file`, range by range."""

    def __init__(self, location: Path, recorder: Recorder) -> None:
        super().__init__(location, recorder)
        self._file_system, self._path, self._lock = _place(location)

    @contextmanager
    def _answered(self, start: int, stop: int) -> Iterator[Iterator[bytes]]:
        with _translated(self._location):
            yield self._chunks(start, stop)

    def _chunks(self, start: int, stop: int) -> Iterator[bytes]:
        for begin in range(start, stop, _CHUNK_BYTES):
            end = min(begin + _CHUNK_BYTES, stop)
            with self._lock:
                content = self._file_system.cat_file(self._path, start=begin, end=end)
            if len(content) > end - begin:
                raise ReadError(self._shown, f"asked for bytes {begin}-{end - 1}, {len(content)} bytes came")
            if len(content) < end - begin:
                raise ended_early(self._shown, begin + len(content), missing=stop - begin - len(content))
            yield content


def scheme_named(name: str) -> SourceScheme | None:
    """Return the scheme of a name that fsspec knows, installed or not; None of another."""
    import fsspec
    from fsspec.registry import known_implementations

    if name not in known_implementations and name not in fsspec.registry:
        return None
    return SourceScheme(name=name, open=FsspecSource, identity=_identity, pin=_pinned, list_folder=_list_folder)


def _translated(location: Path) -> AbstractContextManager[None]:
    return translated((Exception,), _failure, location)  # file systems raise any error


def _failure(location: Path, error: Exception) -> BigloadError:
    shown = address_text(location)
    if isinstance(error, FileNotFoundError):
        return missing(shown, "no such file")
    scheme, kind = str(location).partition(":/")[0], type(error).__name__
    if isinstance(error, PermissionError):
        hint = refusal_hint(scheme) if scheme in STORES else _CLIENT_HINT
        return AccessDeniedError(shown, _reason(error), hint=hint)
    if scheme in STORES and "Credentials" in kind:  # of botocore: none were found, or half of them
        return AccessDeniedError(shown, _reason(error), hint=credentials_hint(scheme))
    is_unreachable = scheme in STORES and "Connect" in kind
    return ReadError(shown, f"{kind}: {_reason(error)}", hint=connection_hint(scheme) if is_unreachable else None)


def _reason(error: Exception) -> str:
    text = next((text for text in (getattr(error, "strerror", None), str(error)) if text), "no reason given")
    return re.sub(r"\S*://\S*", "…", text.partition("\n")[0])[:200]


def _place(location: Path) -> tuple[Any, str, AbstractContextManager[object]]:
    """Return the file system of a location, the path there, and the lock of reads where threads must take turns."""
    from fsspec.core import url_to_fs

    name = str(location).partition(":/")[0]
    try:
        with _translated(location):
            file_system, path = url_to_fs(address_text(location))
    except ReadError as error:
        if "ImportError" not in error.message and "ModuleNotFoundError" not in error.message:
            raise
        if name in STORES:
            raise MissingPackageError(f"{name}://", "obstore", extra="remote") from None
        raise CheckpointError(error.message, hint="install what it names") from None
    is_safe = file_system.async_impl or name in _THREAD_SAFE
    return file_system, path, nullcontext() if is_safe else _lock_of(file_system)


@cache
def _lock_of(_file_system: object) -> RLock:
    return RLock()


def _pinned(location: Path) -> Path:
    parts = urlsplit(address_text(location))
    if parts.password is not None or parts.query:
        shown = f"{parts.scheme}://{parts.hostname}{parts.path}"
        hint = "secrets of an address would be written into plans; configure the client of the service instead"
        raise CheckpointNotFoundError(shown, "an address with a password or a query is not read", hint=hint)
    _place(location)
    return location


def _identity_of(info: Mapping[str, Any]) -> SourceIdentity:
    found = next((info[key] for key in _VERSION_KEYS if info.get(key)), "")
    return SourceIdentity(num_bytes=int(info["size"] or 0), version=(plain_etag(str(found)),))


def _identity(location: Path) -> SourceIdentity:
    file_system, path, lock = _place(location)
    with _translated(location), lock:
        file_system.invalidate_cache()
        info = file_system.info(path)
        if info["type"] != "file":
            raise missing(address_text(location), "not a file")
        return _identity_of(info)


def _list_folder(location: Path) -> Mapping[str, SourceIdentity]:
    file_system, path, lock = _place(location)
    prefix = f"{path.rstrip('/')}/"
    try:
        with _translated(location), lock:
            file_system.invalidate_cache()
            found = file_system.find(path, detail=True)
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise
    return {
        name.removeprefix(prefix): _identity_of(info)
        for name, info in found.items()
        if name.startswith(prefix) and info["type"] == "file"
    }
