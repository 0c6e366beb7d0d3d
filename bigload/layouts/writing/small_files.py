"""Files of an output that are no shards (config, tokenizer, index, plan, manifest): written, read back, compared."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import xxhash

from bigload.checkpoint.records.manifest import FileRecord
from bigload.errors import DamagedOutputError, ReadError
from bigload.layouts.writing.output_file_writer import write_errors
from bigload.machine.files.page_cache import evict_pages
from bigload.units import MIB

_PIECE_BYTES = 4 * MIB


def write_file(path: Path, content: Iterable[bytes]) -> FileRecord:
    """Write a file, in place of any older file or link of this name, and wait until the disk has it.

    Returns:
        Its size and its digest, for the manifest and for `check_file`.
    """
    digest, num_bytes = xxhash.xxh3_128(), 0
    with write_errors(path):
        with suppress(FileNotFoundError):
            path.unlink()
        with path.open("xb") as file:
            for piece in content:
                digest.update(piece)
                num_bytes += file.write(piece)
            file.flush()
            os.fsync(file.fileno())
    return FileRecord(num_bytes=num_bytes, digest=digest.hexdigest())


def check_file(path: Path, record: FileRecord) -> None:
    """Read a file back, from the disk where the system allows it, and compare it with what was written."""
    digest, num_bytes = xxhash.xxh3_128(), 0
    try:
        with path.open("rb", buffering=0) as file:
            with suppress(OSError):
                evict_pages(file.fileno())
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
                num_bytes += len(piece)
    except OSError as error:
        raise ReadError(path, error) from error
    if (num_bytes, digest.hexdigest()) != (record.num_bytes, record.digest):
        raise DamagedOutputError.while_writing(path)
