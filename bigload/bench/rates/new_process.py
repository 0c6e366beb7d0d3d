"""A function run in a new interpreter, where what it needs has not been imported, nor run before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import TypeVar

from bigload.errors import BigloadError

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {module} import answer; answer()"

T = TypeVar("T")


def run_in_new_process(function: Callable[[], T]) -> T:
    """Return what `function`, of a module, returns there: what JSON can hold.

    Processes of multiprocessing would import the script again.

    Raises:
        BigloadError: the process ended without an answer; the text has the last line that it wrote.
    """
    process = subprocess.run(
        [sys.executable, "-P", "-c", _BOOT.format(module=__name__), json.dumps(sys.path)],
        input=json.dumps([function.__module__, function.__name__]).encode(),
        capture_output=True,
        check=False,
    )
    if process.returncode:
        written = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = ": ".join([f"exit code {process.returncode}", *written])
        raise BigloadError(f"a process that measures a load has failed ({why})", hint="run it again")
    found: T = json.loads(process.stdout)
    return found


def answer() -> None:
    """Run what standard input names, and write its result; the work of the new process."""
    answers, sys.stdout = sys.stdout, sys.stderr
    module, name = json.load(sys.stdin)
    json.dump(getattr(import_module(module), name)(), answers)
