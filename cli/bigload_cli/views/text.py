"""Paths quoted for a command line."""

from __future__ import annotations

import shlex
from pathlib import Path

from bigload.plain_text import printable


def argument(path: str | Path) -> str:
    """Return a path as a word of a command that can be copied into a shell."""
    return shlex.quote(printable(str(path)))
