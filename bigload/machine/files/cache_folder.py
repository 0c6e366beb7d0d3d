"""The folder of what bigload keeps between runs, and files in it that are written whole."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from bigload.documents import staged_file


def cache_folder() -> Path:
    """Return the folder of what bigload keeps, `$XDG_CACHE_HOME/bigload`; it can be deleted at any time."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "bigload")


def keep_file(path: Path, content: bytes) -> bool:
    """Write a file of the cache whole or not at all; return whether it is there now.

    A full disk or a folder that is read-only is no error.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with staged_file(path) as staged:
            staged.write_bytes(content)
        return True
    return False
