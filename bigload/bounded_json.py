"""Read JSON from strangers within bounds: the size of a file, and the number of values before they are parsed."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

MAX_VALUES = 2**22
"""Lists, objects and members that a text may hold: 94 MB of `[]` became 2.6 GB in memory. A header of 100 000 tensors
has less than a million."""

MAX_CONFIG_BYTES = 64 * 2**20
"""Of a config.json and its like; the largest, with a vocabulary, have a few MiB."""


def read_bounded(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a regular file of at most `max_bytes`. Devices and FIFOs are opened, but not read.

    Raises:
        OSError: the system refused.
        ValueError: it is no regular file, or larger.
    """
    # O_NONBLOCK: opening a FIFO must not wait for a writer that never comes.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a regular file")
        if status.st_size > max_bytes:
            raise ValueError(f"{status.st_size} bytes, expected {max_bytes} at most")
        content = b""
        while piece := os.read(descriptor, status.st_size + 1 - len(content)):  # a read returns 2 GiB at most
            content += piece
        if len(content) > status.st_size:
            raise ValueError("it grew while it was read")
        return content
    finally:
        os.close(descriptor)


def loads_bounded(
    text: bytes | str, *, object_pairs_hook: Callable[[list[tuple[str, object]]], object] | None = None
) -> object:
    """Parse JSON of at most `MAX_VALUES` values.

    Raises:
        ValueError: more values, or no JSON.
        RecursionError: nested too deeply.
    """
    check_values(text)
    document: object = json.loads(text, object_pairs_hook=object_pairs_hook)
    return document


def check_values(text: bytes | str) -> None:
    """Raise ValueError if `text` has more values than `MAX_VALUES`, counted by what comes before each: `[`, `{` or `,`.

    Those in strings count as well: a scan at the speed of memory is what makes this cheap.
    """
    if len(text) <= MAX_VALUES:
        return
    count = sum(map(text.count, (b"[", b"{", b",") if isinstance(text, bytes) else ("[", "{", ",")))  # type: ignore[arg-type]
    if count > MAX_VALUES:
        raise ValueError(f"about {count} values, expected {MAX_VALUES} at most")
