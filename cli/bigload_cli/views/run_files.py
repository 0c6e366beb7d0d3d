"""The files that a run leaves behind: checked before it begins, written whole or not at all after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.errors import BenchOptionError
from bigload.planning.plan_file import write_whole
from bigload_cli.views.bench_files import check_writable

if TYPE_CHECKING:
    from bigload.runtime.streaming.run_log import RunStats

_SCHEMA = '"schema": "bigload.bench-run/'


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where to write what; `None` for what nobody asked for."""

    document: Path | None = None
    trace: Path | None = None

    def check(self) -> None:
        """Raise for what could not be written in the end, before minutes are spent on measuring.

        Raises:
            BenchOptionError: two results for one file.
            OutputExistsError: something stands there that is not such a file of bigload's.
            WriteError: the folder is not there, or may not be written to.
        """
        if self.document is not None and self.trace is not None and self.document.resolve() == self.trace.resolve():
            raise BenchOptionError("two results cannot go into one file", hint="name a file for each")
        if self.document is not None:
            check_writable(self.document, made_by=_SCHEMA)
        if self.trace is not None:
            check_writable(self.trace, made_by='"made_by": "bigload run"')

    def write(self, document: Mapping[str, object], stats: RunStats | None, *, name: str) -> list[Path]:
        """Write what was asked for; return the files in the order in which they were written.

        Raises:
            WriteError: the system refused.
        """
        written = []
        if self.document is not None:
            write_whole(self.document, json.dumps(document, indent=2) + "\n")
            written.append(self.document)
        if self.trace is not None:
            from bigload.bench.run_trace import run_trace

            write_whole(self.trace, json.dumps(run_trace({} if stats is None else {name: stats})))
            written.append(self.trace)
        return written
