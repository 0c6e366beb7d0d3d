"""Small files of an output (config, tokenizer, index, plan, manifest): written, flushed, read back and compared."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bigload.errors import ReadError, VerificationError, WriteError
from bigload.loading.bytesource import PositionalReader


def write_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Write a small file, in place of any older file or link of this name, and wait until the disk has it.

    Raises:
        WriteError: the system refused.
    """
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        with path.open("xb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise WriteError(path, error) from error


def check_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Read back a file that was written with `content`, from the disk where the system allows it, and compare.

    Raises:
        VerificationError: a byte differs.
        ReadError: the file has another size, or cannot be read.
    """
    position = 0
    with PositionalReader(path) as reader:
        with suppress(OSError):
            os.posix_fadvise(reader.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for expected in [content] if isinstance(content, bytes) else content:
            found = bytearray(len(expected))
            reader.read_into([memoryview(found)], position)
            if found != expected:
                first = next(index for index in range(len(found)) if found[index] != expected[index])
                raise VerificationError(path, offset=position + first)
            position += len(expected)
        size = os.fstat(reader.descriptor).st_size
        if size != position:
            raise ReadError(path, f"it has {size} bytes on the disk, {position} were written")
