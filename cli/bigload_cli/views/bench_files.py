"""The files that a bench leaves behind: checked before it runs, written whole or not at all after it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from bigload.bench.phases import MADE_BY, chrome_trace
from bigload.bench.report import BenchReport
from bigload.documents import check_replaceable, is_stream
from bigload.errors import BenchOptionError, MissingPackageError, WriteError
from bigload_cli.result_files import answers_on_stdout, is_stdout, write_result

_PICTURES = (".png", ".svg")
_BEGINNING_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Exports:
    """Where to write what; `None` for what nobody asked for."""

    markdown: Path | None = None
    plot: Path | None = None
    trace: Path | None = None

    def check(self, *, as_json: bool = False) -> bool:
        """Raise for what could not be written in the end, before minutes are spent on measuring.

        Returns:
            Whether one of them goes to stdout, in place of the table.

        Raises:
            BenchOptionError: two results for one file, or a picture of another kind.
            MissingPackageError: matplotlib is not installed.
            OutputExistsError: something stands there that is not such a file of bigload's.
            WriteError: the folder is not there, or may not be written to.
        """
        wanted = [path for path in (self.markdown, self.plot, self.trace) if path is not None]
        on_stdout = answers_on_stdout(wanted, as_json=as_json)
        if self.plot is not None:
            if self.plot.suffix.lower() not in _PICTURES:
                raise BenchOptionError(f"--plot {self.plot}: a picture ends with {' or '.join(_PICTURES)}")
            if find_spec("matplotlib") is None:
                raise MissingPackageError("--plot", "matplotlib", extra="plot")
        for path in wanted:
            check_writable(path)
        return on_stdout

    def write(self, report: BenchReport, *, name: str) -> list[Path]:
        """Write what was asked for; return the files in the order in which they were written.

        Raises:
            WriteError: the system refused.
        """
        from bigload_cli.views.bench_markdown import markdown
        from bigload_cli.views.bench_plot import picture

        makers: list[tuple[Path | None, Callable[[Path], str | bytes]]] = [
            (self.markdown, lambda _: markdown(report, name=name)),
            (self.plot, lambda path: picture(report, name=name, suffix=path.suffix)),
            (self.trace, lambda _: _trace_text(report)),
        ]
        written = []
        for path, make in makers:
            if path is not None:
                write_result(path, make(path))
                written.append(path)
        return written


def _trace_text(report: BenchReport) -> str:
    return json.dumps(chrome_trace({result.name: result.activities for result in report.results}))


def check_writable(path: Path, *, made_by: str = MADE_BY) -> None:
    """Raise unless a result can be put at `path`; what stands there already has to hold `made_by`, as ours do.

    Raises:
        OutputExistsError: something stands there that was not made by that.
        WriteError: the folder is not there, or may not be written to.
    """
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
            return made_by.encode() in file.read(_BEGINNING_BYTES)
    except OSError:
        return False
