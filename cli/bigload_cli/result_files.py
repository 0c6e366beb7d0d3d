"""Result files of options such as `-o`: checked before a command measures, written whole after it.

`-` or /dev/stdout makes the result the answer, in place of the table.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bigload.documents import check_replaceable, is_stream, write_whole
from bigload.errors import OptionError, WriteError

_SEARCHED_BYTES = 4096
_STDOUT = frozenset(("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"))


def is_stdout(path: Path | None) -> bool:
    """Return whether `path` names the standard output."""
    return path is not None and str(path) in _STDOUT


def answers_on_stdout(paths: Sequence[Path | None], *, as_json: bool = False) -> bool:
    """Return whether one of the results goes to stdout, as the answer; `paths` are None for what was not asked for.

    With `as_json`, `--json` asks for another document there.
    """
    wanted = [path for path in paths if path is not None]
    num_answers = sum(map(is_stdout, wanted))
    if len({path.resolve() for path in wanted}) < len(wanted) or num_answers + (as_json and num_answers > 0) > 1:
        raise OptionError("two results cannot go into one file", hint="name a file for each")
    return num_answers > 0


def check_results(paths: Sequence[Path | None], *, made_by: str, as_json: bool = False) -> bool:
    """Raise for a file that could not be written, before minutes are spent on measuring.

    An existing file is replaced only if its first 4 KiB hold the mark `made_by`.

    Returns:
        Whether one of them goes to stdout, in place of the table.
    """
    on_stdout = answers_on_stdout(paths, as_json=as_json)
    for path in paths:
        if path is not None and not is_stdout(path) and not is_stream(path):
            _check_writable(path, made_by)
    return on_stdout


def _check_writable(path: Path, made_by: str) -> None:
    folder = path.parent
    if not folder.is_dir():
        raise WriteError(path, NotADirectoryError(errno.ENOENT, f"there is no folder {folder}"))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise WriteError(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    check_replaceable(path, lambda file: _is_ours(file, made_by), reason=f"it was not made by {made_by}")


def _is_ours(path: Path, made_by: str) -> bool:
    try:
        with path.open("rb") as file:
            return made_by.encode() in file.read(_SEARCHED_BYTES)
    except OSError:
        return False


def write_results(results: Sequence[tuple[Path | None, Callable[[], str | bytes]]]) -> list[Path]:
    """Write each result that has a path; return the paths in that order."""
    written = []
    for path, make in results:
        if path is not None:
            write_result(path, make())
            written.append(path)
    return written


def write_result(path: Path, content: str | bytes) -> None:
    """Write `content` to a file, whole or not at all, or to stdout."""
    if is_stdout(path):
        from bigload_cli.output import print_bytes

        print_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape"))
        return
    write_whole(path, content)


def say_written(paths: Sequence[Path]) -> None:
    """Say on stderr which result files were written."""
    from bigload_cli.output import say

    for path in paths:
        if not is_stdout(path):
            say(f"Wrote {path}.")
