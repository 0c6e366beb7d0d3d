"""The files that a run leaves behind: checked before it begins, written whole or not at all after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigload_cli.result_files import answers_on_stdout, is_stdout, write_result
from bigload_cli.views.bench_files import check_writable

if TYPE_CHECKING:
    from bigload.runtime.streaming.run_log import RunStats

_SCHEMA = '"schema": "bigload.bench-run/'


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Where to write what; `None` for what nobody asked for."""

    document: Path | None = None
    trace: Path | None = None

    def check(self, *, as_json: bool = False) -> bool:
        """Raise for what could not be written in the end, before minutes are spent on measuring.

        Returns:
            Whether one of them goes to stdout, in place of the table.

        Raises:
            BenchOptionError: two results for one file.
            OutputExistsError: something stands there that is not such a file of bigload's.
            WriteError: the folder is not there, or may not be written to.
        """
        # --json and `--output -` are the same document.
        on_stdout = answers_on_stdout((self.document, self.trace), as_json=as_json and not is_stdout(self.document))
        if self.document is not None:
            check_writable(self.document, made_by=_SCHEMA)
        if self.trace is not None:
            check_writable(self.trace, made_by='"made_by": "bigload run"')
        return on_stdout

    def write(self, document: Mapping[str, object], stats: RunStats | None, *, name: str) -> list[Path]:
        """Write what was asked for; return the files in the order in which they were written.

        Raises:
            WriteError: the system refused.
        """
        written = []
        if self.document is not None:
            write_result(self.document, json.dumps(document, indent=2) + "\n")
            written.append(self.document)
        if self.trace is not None:
            from bigload.bench.run_trace import run_trace

            write_result(self.trace, json.dumps(run_trace({} if stats is None else {name: stats})))
            written.append(self.trace)
        return written
