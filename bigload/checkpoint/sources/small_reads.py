"""Small reads of checkpoint files, such as headers: few requests, and none for what was read before.

A remote file is read from its beginning in one guessed piece. What was read is kept in `$XDG_CACHE_HOME/bigload` under
a digest of location and identity, where equal identities mean equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from bigload.checkpoint.byte_source import ByteSource, ReadRange, SourceIdentity, read_range, scheme_of
from bigload.checkpoint.sources.ranged_source import RangedSource
from bigload.machine.files.cache_folder import cache_folder, keep_file
from bigload.machine.threads.activities import NO_RECORDER

GUESSED_BYTES = 64 << 10
"""First read of a file of which nothing is known: three of four headers are smaller."""


TRUSTED_SECONDS = 600
"""How long an answer of a service is taken to hold: which commit a branch is at, and which objects a folder has. A
session of commands (inspect, plan, reshard) then sees one version and asks once."""


@contextmanager
def opened_range(
    location: Path, identity: SourceIdentity | None = None, *, guess: int = GUESSED_BYTES
) -> Iterator[ReadRange]:
    """Open the file at `location` by its scheme, for a few small reads.

    Args:
        location: Local or remote.
        identity: What is there, if that is known already.
        guess: Bytes from the beginning on that are probably read; remote sources fetch them at once.
    """
    scheme = scheme_of(location)
    if not scheme.is_local:
        identity = identity or scheme.identity(location)

    def opened() -> ByteSource:
        source = scheme.open(location, NO_RECORDER)
        if scheme.has_strong_versions and identity is not None and isinstance(source, RangedSource):
            source.etag = identity.etag  # what is kept on disk is kept for this version
        return source

    with closing(_Opening(opened, is_late=scheme.has_strong_versions)) as opening:
        if identity is None or scheme.is_local:
            yield opening.read
            return
        path = _cached_at(location, identity) if scheme.has_strong_versions else None
        parts = _Parts(opening.read, num_bytes=identity.num_bytes, guess=guess, known=_kept(path))
        yield parts.read
        if path is not None and parts.is_grown:
            _keep(path, parts.known)


def is_recent(path: Path) -> bool:
    """Return whether a file of the cache is as young as `TRUSTED_SECONDS`, and `BIGLOAD_REFRESH=1` is not set.

    Raises:
        OSError: there is none.
    """
    return 0 <= time.time() - path.stat().st_mtime < TRUSTED_SECONDS and os.environ.get("BIGLOAD_REFRESH") != "1"


class _Opening:
    """A source that is opened by its first read where nothing may have to be read."""

    def __init__(self, open_source: Callable[[], ByteSource], *, is_late: bool) -> None:
        self._open = open_source
        self._source = None if is_late else open_source()

    def read(self, start: int, stop: int) -> bytes:
        if self._source is None:
            self._source = self._open()
        return read_range(self._source, start, stop)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class _Parts:
    """Reads of one file: what is known is not read again, and the first read fetches `guess` bytes."""

    def __init__(self, fetch: ReadRange, *, num_bytes: int, guess: int, known: list[tuple[int, bytes]]) -> None:
        self._fetch = fetch
        self._num_bytes = num_bytes
        self._guess = guess
        self.known = known
        self.is_grown = False

    def read(self, start: int, stop: int) -> bytes:
        for index, (begin, content) in enumerate(self.known):
            if begin <= start <= begin + len(content):
                if stop > begin + len(content):
                    self.known[index] = begin, content + self._fetched(begin + len(content), stop)
                return self.known[index][1][start - begin : stop - begin]
        content = self._fetched(start, stop if start else max(stop, min(self._guess, self._num_bytes)))
        self.known.append((start, content))
        return content[: stop - start]

    def _fetched(self, start: int, stop: int) -> bytes:
        self.is_grown = True
        return self._fetch(start, stop)


def _cached_at(location: Path, identity: SourceIdentity) -> Path:
    key = hashlib.sha256(json.dumps([str(location), identity.num_bytes, *identity.version]).encode()).hexdigest()
    return cache_folder() / "headers" / key[:2] / key


def _kept(path: Path | None) -> list[tuple[int, bytes]]:
    """Return the parts that are kept at `path`; none if it is not whole."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if path is not None:
            line, _, content = path.read_bytes().partition(b"\n")
            entry = json.loads(line)
            if entry["crc32"] == zlib.crc32(content):
                parts, position = [], 0
                for start, length in entry["parts"]:
                    parts.append((start, content[position : position + length]))
                    position += length
                return parts
    return []


def _keep(path: Path, parts: list[tuple[int, bytes]]) -> None:
    content = b"".join(part for _, part in parts)
    entry = {"crc32": zlib.crc32(content), "parts": [[start, len(part)] for start, part in parts]}
    keep_file(path, json.dumps(entry).encode() + b"\n" + content)
