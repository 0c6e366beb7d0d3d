"""Writer of one output file: with O_DIRECT where the file system offers it, else through the page cache.

Written bytes are read only once, for comparison. In the page cache they would evict pages that others need, and cost a
copy and, on many machines, fresh memory for every page.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bigload.checkpoint.byte_source import fill
from bigload.descriptors import flush_data
from bigload.errors import BigloadError, ReadError, WriteError
from bigload.loading.readers.direct import direct_alignment
from bigload.machine.files.page_cache import evict_pages
from bigload.machine.libc import libc

_libc_fallocate = getattr(libc, "fallocate", None)
_libc_sync_file_range = getattr(libc, "sync_file_range", None)
_START, _START_AND_WAIT = 2, 1 | 2 | 4
_LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)


class OutputFileWriter:
    """Open output file. Threads may write and read different blocks of it at once.

    Args:
        path: The file. Unless part of it is kept, it is created anew and replaces any file or link of this name.
        num_bytes: Final size.
        kept_bytes: Bytes to keep of an older file at this path; the rest is dropped.
        is_there: Another process has created the file, with its size, and may be writing to it.
        alignment: Alignment of direct writes in bytes; `None` to write through the page cache.

    Attributes:
        has_failed: A system call failed. Lost pages are reported only once, so later flushes prove nothing.
    """

    def __init__(
        self, path: Path, *, num_bytes: int, alignment: int | None, kept_bytes: int = 0, is_there: bool = False
    ) -> None:
        self.path = path
        self.has_failed = False
        self._num_bytes = num_bytes
        self._is_direct = alignment is not None
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_DIRECT if self._is_direct else 0)
        self.descriptor = -1
        try:
            with write_errors(path):
                if not (kept_bytes or is_there):
                    _unlink(path)
                    flags |= os.O_CREAT | os.O_EXCL
                self.descriptor = os.open(path, flags, 0o666)
                if os.fstat(self.descriptor).st_nlink > 1:
                    raise OSError(errno.EMLINK, "it is a hard link, expected a file without another name")
                if is_there:
                    return
                os.ftruncate(self.descriptor, kept_bytes)
                # One block too long until it is finished, so that readers of safetensors refuse it: a file left by a
                # crash has a header, and with its final size it would pass for complete.
                os.ftruncate(self.descriptor, self.padded(num_bytes) + BLOCK_BYTES)
        except BaseException:  # Ctrl-C, too
            self.close()
            raise

    def reserve(self, start: int, stop: int) -> None:
        """Allocate disk space for these bytes, so that several threads write blocks in place."""
        if _libc_fallocate is None or start >= stop:
            return
        stop = self.padded(stop)
        with self._writing():
            if _libc_fallocate(self.descriptor, 0, ctypes.c_int64(start), ctypes.c_int64(stop - start)):
                number = ctypes.get_errno()
                if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
                    raise OSError(number, os.strerror(number))

    def write(self, view: memoryview, offset: int) -> None:
        """Write `view`, whole blocks of memory and of the file."""
        start, num_bytes = offset, len(view)
        with self._writing():
            while view:
                count = os.pwrite(self.descriptor, view, offset)
                view, offset = view[count:], offset + count
            if not self._is_direct:
                # Left alone, dirty pages pile up in memory, and the flush at the end waits for all of them.
                self._sync_range(start, num_bytes, _START)

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view`, whole blocks, from the disk."""
        if not self._is_direct:
            with self._writing():
                if not self._sync_range(offset, len(view), _START_AND_WAIT):
                    flush_data(self.descriptor)
            evict_pages(self.descriptor, offset, len(view))
        fill([view], self.descriptor, offset, self.path)

    def flush(self) -> None:
        with self._writing():
            flush_data(self.descriptor)

    def finish(self) -> None:
        with self._writing():
            os.ftruncate(self.descriptor, self._num_bytes)
            os.fsync(self.descriptor)
        with suppress(OSError):
            evict_pages(self.descriptor)

    def close(self) -> None:
        """Close the file. Safe to repeat."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def padded(self, num_bytes: int) -> int:
        """Return the bytes to write or read for `num_bytes` at the end of the file: whole blocks where it is direct."""
        return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES if self._is_direct else num_bytes

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            with write_errors(self.path):
                yield
        except WriteError:
            self.has_failed = True
            raise

    def _sync_range(self, offset: int, num_bytes: int, flags: int) -> bool:
        """Write these pages to the disk now (sync_file_range(2)); return whether the system can do that."""
        if _libc_sync_file_range is None:
            return False
        if not _libc_sync_file_range(self.descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), flags):
            return True
        number = ctypes.get_errno()
        if number in _LOST:  # reported only once: a later flush would succeed
            raise OSError(number, os.strerror(number))
        return False


BLOCK_BYTES = 4096
"""Windows are multiples of it, and disks write it atomically; see `direct_write_alignment`."""


def direct_write_alignment(folder: Path, *, rank: int = 0) -> int | None:
    """Return the alignment of direct writes to files in `folder`; `None` if it exceeds a block or there are none.

    Tried with a small file, named after `rank` so that ranks do not collide.
    """
    probe = folder / f".bigload-probe-{rank}"
    with write_errors(probe):
        _unlink(probe)
        with probe.open("xb") as file:
            file.write(bytes(BLOCK_BYTES))
        try:
            alignment = direct_alignment(probe)
        except ReadError:
            alignment = None
        finally:
            probe.unlink()
    return alignment if alignment is not None and BLOCK_BYTES % alignment == 0 else None


def _unlink(path: Path) -> None:
    """Remove a file or link: writing into it would write into the target of a link, hard links included."""
    with suppress(FileNotFoundError):
        path.unlink()


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Raise OSErrors as a WriteError for `path`; errors of bigload pass unchanged."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BigloadError):
            raise
        raise WriteError(path, error) from error
