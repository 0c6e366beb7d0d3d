"""Listings of folders of a service: one request instead of one for each file.

Only where versions are strong (`SourceScheme.has_strong_versions`), so that a listing and a file's own answer state the
same ETag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from bigload.checkpoint.byte_source import SourceIdentity, address_text, scheme_of
from bigload.checkpoint.sources.ranged_source import missing
from bigload.errors import ReadError
from bigload.machine.files.cache_folder import keep_file

_listed: ContextVar[tuple[Path, Mapping[str, SourceIdentity]] | None] = ContextVar("listed", default=None)


@contextmanager
def listed(root: Path, files: Mapping[str, SourceIdentity]) -> Iterator[None]:
    """Have `identity_of` take in this context that `files` are all that is in the folder."""
    token = _listed.set((root, files) if scheme_of(root).has_strong_versions else None)
    try:
        yield
    finally:
        _listed.reset(token)


def identity_of(location: Path) -> SourceIdentity:
    """Return what is at a location, as the listing of this context says, or else as the service says now.

    Raises as `SourceScheme.identity` does.
    """
    root, files = _listed.get() or (None, {})
    if root is None or not location.is_relative_to(root):
        return scheme_of(location).identity(location)
    found = files.get(location.relative_to(root).as_posix())
    if found is None:
        raise missing(address_text(location), "no such file")
    return found


def identities_now(root: Path, files: Collection[str]) -> Callable[[str], SourceIdentity]:
    """Return a function that gives what each of `files` in a folder is now, by one listing where that is possible.

    An absolute path is that of a file of this machine, wherever the folder is.

    Raises as `SourceScheme.list_folder` does, and the function as `identity` does.
    """
    scheme = scheme_of(root)
    is_listed = scheme.list_folder is not None and scheme.has_strong_versions and len(files) > 1
    listing = scheme.list_folder(root) if scheme.list_folder is not None and is_listed else {}
    return lambda file: listing.get(file) or scheme_of(root / file).identity(root / file)


def keep_listing(path: Path, files: Mapping[str, SourceIdentity]) -> None:
    """Keep a listing of a folder of a service as the file `path` of the cache."""
    entries = [[name, found.num_bytes, found.version, found.sha256] for name, found in files.items()]
    keep_file(path, json.dumps(entries).encode())


def kept_listing(path: Path) -> Mapping[str, SourceIdentity] | None:
    """Return the listing that `keep_listing` kept; `None` if there is none, or none that can be read."""
    try:
        return {
            name: SourceIdentity(num_bytes=num_bytes, version=tuple(version), sha256=sha256)
            for name, num_bytes, version, sha256 in json.loads(path.read_bytes())
        }
    except (OSError, ValueError, TypeError):
        return None


def is_there(location: Path) -> bool:
    """Return whether there is a file at a local or pinned location."""
    if scheme_of(location).is_local:
        return location.exists()
    try:
        identity_of(location)
    except ReadError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return False
        raise
    return True
