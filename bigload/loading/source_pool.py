"""Open sources of the files of a load; of very many files only some are open at a time, for `ulimit -n` may be 256."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from bigload.checkpoint.byte_source import ByteSource
from bigload.loading.readers.mapped import MappedFile

MAX_OPEN_FILES = 64
"""A source has two descriptors at most, and more files than these are not being read at one moment."""


class SourcePool:
    """Sources by file, lent to threads. Those lent least recently are closed when more than `limit` are open.

    A file is opened again by its name: whoever needs it to be the same one compares identities before and after.
    """

    def __init__(self, open_source: Callable[[str], ByteSource], limit: int) -> None:
        self._open_source = open_source
        self._limit = limit
        self._changed = threading.Condition()
        self._opening: set[str] = set()
        self._open: dict[str, ByteSource] = {}  # the least recently lent first
        self._maps: dict[str, MappedFile] = {}  # without a descriptor; tensors are views of these very maps
        self._users: Counter[str] = Counter()

    @contextmanager
    def lend(self, file: str) -> Iterator[ByteSource]:
        """Give the source of a file, opened if it is not; it stays open while it is lent."""
        source = self._lent(file)
        try:
            yield source
        finally:
            with self._changed:
                self._users[file] -= 1

    def _lent(self, file: str) -> ByteSource:
        """Return the source of a file with one more user. Others need not wait while it is opened: that may be slow."""
        with self._changed:
            self._changed.wait_for(lambda: file not in self._opening)
            found = self._open.pop(file, None) or self._maps.get(file)
            if found is not None:
                self._users[file] += 1
                if file not in self._maps:
                    self._open[file] = found
                return found
            self._opening.add(file)
            self._make_room()
        try:
            opened = self._open_source(file)
        except BaseException:
            with self._changed:
                self._opening.remove(file)
                self._changed.notify_all()
            raise
        with self._changed:
            self._opening.remove(file)
            self._users[file] += 1
            self._open[file] = opened
            self._changed.notify_all()
        return opened

    def close(self) -> None:
        """Close all."""
        with ExitStack() as stack:
            for source in (*self._open.values(), *self._maps.values()):
                stack.callback(source.close)

    def _make_room(self) -> None:
        if len(self._open) + len(self._opening) <= self._limit:
            return
        idle = next((each for each in self._open if not self._users[each]), None)
        if idle is None:
            return
        source = self._open.pop(idle)
        if isinstance(source, MappedFile):
            source.close_descriptor()
            self._maps[idle] = source
        else:
            source.close()


@contextmanager
def opened_sources(
    files: Sequence[str], open_source: Callable[[str], ByteSource], *, limit: int = MAX_OPEN_FILES
) -> Iterator[SourcePool]:
    """Give a pool with the first `limit` of `files` open; all are closed again, however this ends."""
    pool = SourcePool(open_source, limit)
    try:
        for file in files[:limit]:
            with pool.lend(file):
                pass
        yield pool
    finally:
        pool.close()
