"""I/O methods of a load; a module of its own, since the help of the command line imports it."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """I/O method by which the bytes of a checkpoint are brought into memory.

    `read`: positional reads through the page cache, into memory of this process. `direct`: the same past the page
    cache (O_DIRECT). `mmap`: tensors stay pages of the file, shared with every process that maps it, copied when they
    are first written to; what cannot stay (another dtype, another device) is read. `auto`: `read` or `direct`,
    whichever is faster for these files now.
    """

    AUTO = "auto"
    READ = "read"
    MMAP = "mmap"
    DIRECT = "direct"
