"""Result files of measuring commands: checked before a run, written atomically after it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bigload.documents import check_replaceable, is_stream
from bigload.errors import MissingPackageError, OptionError, WriteError
from bigload_cli.result_files import answers_on_stdout, is_stdout, write_result

_PICTURE_SUFFIXES = (".png", ".svg")
_SEARCHED_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Export:
    """One result file that was asked for.

    Attributes:
        path: Where it is written; `None` if it was not asked for.
        made_by: The mark in its first 4 KiB; an existing file without it is never replaced.
    """

    path: Path | None
    made_by: str


def check_exports(exports: Sequence[Export], *, as_json: bool = False) -> bool:
    """Raise for a file that could not be written, before minutes are spent on measuring.

    Returns:
        Whether one of them goes to stdout, in place of the table.

    Raises:
        OptionError: two results for one file.
        OutputExistsError: the file exists and was not made by bigload.
        WriteError: the folder does not exist, or is not writable.
    """
    on_stdout = answers_on_stdout([export.path for export in exports], as_json=as_json)
    for export in exports:
        if export.path is not None:
            _check_writable(export.path, export.made_by)
    return on_stdout


def check_picture(path: Path | None) -> None:
    """Raise unless a plot can be drawn for `path`.

    Raises:
        OptionError: the suffix is not that of a supported picture format.
        MissingPackageError: matplotlib is not installed.
    """
    if path is None:
        return
    if path.suffix.lower() not in _PICTURE_SUFFIXES:
        raise OptionError(f"--plot {path}: a picture ends with {' or '.join(_PICTURE_SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise MissingPackageError("--plot", "matplotlib", extra="plot")


def write_exports(results: Sequence[tuple[Path | None, Callable[[], str | bytes]]]) -> list[Path]:
    """Write each result that has a path; return the paths in that order.

    Raises:
        WriteError: the system refused.
    """
    written = []
    for path, make in results:
        if path is not None:
            write_result(path, make())
            written.append(path)
    return written


def _check_writable(path: Path, made_by: str) -> None:
    if is_stdout(path) or is_stream(path):
        return
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
