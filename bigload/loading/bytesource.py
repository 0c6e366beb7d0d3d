"""How bytes are read from a file: one protocol, so that tests can inject faults and other ways can be added."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from bigload.errors import ReadError

_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")


class ByteSource(Protocol):
    """An open file. May be used from several threads at once; the opener closes it."""

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`, one after the other, with the bytes from `offset` on.

        Raises:
            ReadError: the system refused, or the file ended before the buffers were full.
        """

    def close(self) -> None:
        """Give the file back."""


class PositionalReader:
    """Reads through the page cache with `preadv`: no shared file position, so threads need no lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(path, error.strerror or str(error)) from error

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`; see `ByteSource`."""
        pending = [buffer for buffer in buffers if buffer.nbytes]
        while pending:
            try:
                count = os.preadv(self._descriptor, pending[:_MAX_BUFFERS], offset)
            except OSError as error:
                raise ReadError(self._path, f"{error.strerror or error} at byte {offset}") from error
            if count == 0:
                missing = sum(buffer.nbytes for buffer in pending)
                raise ReadError(self._path, f"the file ended at byte {offset}, {missing} bytes too early")
            offset += count
            pending = _unfilled(pending, count)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _unfilled(buffers: list[memoryview], count: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[index + 1 :]]
        count -= buffer.nbytes
    return []
