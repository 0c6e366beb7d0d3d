"""Write one result file, whole or not at all; a device or a pipe takes it as a stream and is never read or replaced."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from bigload.errors import OutputExistsError, WriteError

PATH_ERRORS = "surrogateescape"
"""A path need not be text; this is how Python itself carries the bytes of one that is not (PEP 383)."""


def check_replaceable(target: Path, is_ours: Callable[[Path], bool], *, reason: str) -> None:
    """Raise unless a result may go to `target`: a new file, a file that `is_ours`, a character device or a pipe.

    Raises:
        OutputExistsError: something else is there; `reason` says what it is not.
    """
    if takes_a_stream(target):
        return
    if os.path.lexists(target) and target.exists() and not (target.is_file() and is_ours(target)):
        raise OutputExistsError(target, reason, hint="choose another name")


def takes_a_stream(target: Path) -> bool:
    """Return whether `target` is a character device or a pipe, such as /dev/null or a process substitution."""
    try:
        mode = target.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def write_whole(target: Path, content: str | bytes) -> None:
    """Write a file that has all of `content` or does not change; a link stays and the file it names is replaced.

    Raises:
        WriteError: the system refused.
    """
    data = content if isinstance(content, bytes) else content.encode("utf-8", PATH_ERRORS)
    partial = None
    try:
        if takes_a_stream(target):
            with target.open("wb") as stream:
                stream.write(data)
            return
        place = Path(os.path.realpath(target))
        partial = place.with_name(f".{place.name}.{os.getpid()}.partial")
        with partial.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(place)
    except OSError as error:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise WriteError(target, error) from error
