"""Text that comes from files, made fit for a terminal."""

from __future__ import annotations

import shlex
from pathlib import Path


def printable(text: str) -> str:
    r"""Return `text` with everything that a terminal would obey, or could not show, written out as an escape.

    Names in a checkpoint come from strangers: one may hold the codes that clear the screen, or a line feed that makes
    a row look like two.

    >>> printable("layers[0]"), printable("a\x1b[2Jb")
    ('layers[0]', 'a\\x1b[2Jb')
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def argument(path: str | Path) -> str:
    """Return a path as a word of a command that can be copied into a shell."""
    return shlex.quote(printable(str(path)))
