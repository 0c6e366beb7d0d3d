"""Which memory a load ends in: what the bench compares like with like by."""

from __future__ import annotations

from enum import StrEnum


class MemoryKind(StrEnum):
    """Where loaded bytes live.

    `private`: memory of this process, writable, taken anew. `file`: pages of the file in the page cache, shared with
    whoever maps it. `device`: memory of an accelerator.
    """

    PRIVATE = "private"
    FILE = "file"
    DEVICE = "device"
