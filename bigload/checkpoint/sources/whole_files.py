"""Reads of files whose server sends no byte ranges: one response brings all of a file, from its first byte on.

Threads read parts of a file in about their order. A read waits until the response has come so far, and what the
response brings on the way is kept for the other threads, in a file without a name. Responses that only go forward would
need no disk, but each thread would need one of its own, and every read that goes back another: a file would be
transferred many times. Here it is transferred once, unless a read goes back further than what is kept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import BinaryIO

from bigload.checkpoint.byte_source import ended_early, fill
from bigload.checkpoint.sources.range_streams import OpenRange, Stream
from bigload.checkpoint.sources.ranged_source import Retries, TemporaryError
from bigload.errors import ReadError
from bigload.machine.files.cache_folder import cache_folder
from bigload.machine.files.sparse_files import punch_hole
from bigload.machine.threads.thread_pool import abandonable
from bigload.units import GIB, MIB

MAX_KEPT_BYTES = 8 * GIB
"""Kept of all files together: 16 threads of a load take up to 256 MiB each. At most half of the free space."""

ROOM_CHECKED_BYTES = 64 * MIB
"""Bytes of a file that come between two looks at how much is kept."""

MAX_RESPONSES = 32
"""Open at once, of all files: one that is not read to its end stays open, and clients allow 100 connections."""

SERVERS_WITHOUT_RANGES = set[str]()
"""Servers whose last answer was a whole file although a range was asked for."""

_SPACE_HINT = "free some space, or set XDG_CACHE_HOME to a folder of a larger disk"
_lock = threading.Lock()
_open_files: list[WholeFile] = []  # the last used one last


class WholeFile:
    """The bytes of a remote file as one response brings them; the last of them are kept on disk.

    `open_range` asks for the bytes from an offset to the end, and reads over what lies before.
    """

    def __init__(self, shown: str, num_bytes: int, open_range: OpenRange, on_received: Callable[[int], None]) -> None:
        self._shown = shown
        self._num_bytes = num_bytes
        self._open_range = open_range
        self._on_received = on_received
        self._turns = threading.Lock()
        self._stream: Stream | None = None
        self._begin = self._end = 0  # of the bytes that are kept
        self._num_unchecked = 0
        self._is_closed = False
        self._folder = cache_folder()
        self._file = self._opened()
        with _lock:
            _open_files.append(self)

    def read_into(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all of `buffers`; see `ByteSource`. Threads take turns."""
        stop = offset + sum(buffer.nbytes for buffer in buffers)
        if stop > self._num_bytes:
            raise ended_early(self._shown, self._num_bytes, missing=stop - self._num_bytes)
        with self._turn():
            self._receive(offset, stop)
            fill([buffer.cast("B") for buffer in buffers], self._file.fileno(), offset, self._shown)

    def close(self) -> None:
        """Release what is kept; or have the thread do so that uses it, such as one that was left behind, waiting."""
        self._is_closed = True
        if self._turns.acquire(blocking=False):
            try:
                self._end_stream()
                self._file.close()
                with _lock:
                    _open_files[:] = [file for file in _open_files if file is not self]
            finally:
                self._turns.release()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        is_mine = False
        try:
            with abandonable():
                is_mine = self._turns.acquire()
            yield
        finally:
            if is_mine:
                self._end_turn()

    def _end_turn(self) -> None:
        self._turns.release()
        if self._is_closed:  # meanwhile, by another thread, which did not wait
            self.close()

    def _receive(self, start: int, stop: int) -> None:
        """Read the response up to `stop`; a new one if the last was cut off, or `start` is no longer kept."""
        if start < self._begin:
            self._end_stream()
            self._drop(self._end - self._begin)
            self._begin = self._end = start
        retries = Retries(self._shown)
        while self._end < stop:
            try:
                if self._stream is None or not self._stream.is_open:
                    self._end_streams()
                    self._stream = Stream(self, self._end, self._num_bytes, self._open_range)
                chunk = self._stream.take(self._num_bytes)
                if not chunk:
                    raise TemporaryError("the answer was cut off")
            except TemporaryError as error:
                retries.failed(error, self._end)
            else:
                self._keep(chunk)
                self._on_received(len(chunk))
                if self._num_unchecked >= ROOM_CHECKED_BYTES:
                    self._make_room(start)

    def _opened(self) -> BinaryIO:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            raise self._refused(error) from error

    def _keep(self, chunk: memoryview) -> None:
        self._num_unchecked += len(chunk)
        while chunk:
            try:
                written = os.pwrite(self._file.fileno(), chunk, self._end)
            except OSError as error:
                raise self._refused(error) from error
            chunk = chunk[written:]
            self._end += written

    def _make_room(self, needed: int) -> None:
        """Drop bytes if too many are kept: the first ones of the files not used for longest; here those to `needed`."""
        self._num_unchecked = 0
        files = self._others_and_this()
        kept = sum(file._end - file._begin for file in files)
        excess = kept - min(MAX_KEPT_BYTES, (shutil.disk_usage(self._folder).free + kept) // 2)
        for file in files:
            if excess <= 0:
                return
            if file is self:
                excess -= self._drop(min(excess, needed - self._begin))
            elif file._turns.acquire(blocking=False):
                try:
                    excess -= file._drop(excess)
                finally:
                    file._end_turn()

    def _end_streams(self) -> None:
        """Close responses of files that are not read now, the longest unused ones first, if too many are open."""
        waiting = [file for file in self._others_and_this()[:-1] if file._stream is not None and file._stream.is_open]
        for file in waiting[: max(len(waiting) - MAX_RESPONSES + 1, 0)]:
            if file._turns.acquire(blocking=False):
                try:
                    file._end_stream()
                finally:
                    file._end_turn()

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _others_and_this(self) -> tuple[WholeFile, ...]:
        """Return the open files, the last used one last: this one."""
        with _lock:
            _open_files.remove(self)
            _open_files.append(self)
            return tuple(_open_files)

    def _drop(self, num_bytes: int) -> int:
        """Drop the first `num_bytes` that are kept, and return how many they were."""
        dropped = 0 if self._is_closed else min(num_bytes, self._end - self._begin)
        if dropped > 0:
            punch_hole(self._file.fileno(), self._begin, self._begin + dropped)
            self._begin += dropped
        return dropped

    def _refused(self, error: OSError) -> ReadError:
        reason = f"its bytes are kept in {self._folder} meanwhile: {error.strerror or error}"
        return ReadError(self._shown, reason, hint=_SPACE_HINT)
