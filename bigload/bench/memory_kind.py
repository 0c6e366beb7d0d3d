"""Kinds of memory that loads end in; only loads of one kind are compared."""

from __future__ import annotations

from enum import StrEnum


class MemoryKind(StrEnum):
    """The memory that holds loaded bytes.

    `private`: writable memory of this process. `file`: pages of the file in the page cache, shared with other maps.
    `device`: memory of an accelerator.
    """

    PRIVATE = "private"
    FILE = "file"
    DEVICE = "device"
