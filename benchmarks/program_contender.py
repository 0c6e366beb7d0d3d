"""Contenders that are programs of their own, with the memory they take, seen from outside."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from bigload.bench.runner import Contender

_INTERVAL_SECONDS = 0.005
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRun:
    """Time and memory of one process.

    Attributes:
        seconds: Time of its work without start and imports, where it prints that; else of the whole process.
        resident_bytes: Peak resident memory, an interpreter's included.
    """

    seconds: float
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class ProgramContender(Contender):
    """A program that writes `out`, which is removed before each run; `runs` receives what was measured."""

    words: Sequence[str]
    out: Path
    run: Callable[[], object] = lambda: None
    runs: list[ProcessRun] = field(default_factory=list)

    @contextmanager
    def turn(self) -> Iterator[Callable[[], object]]:
        """Yield the function to time; see `Contender`."""
        for path in self.out.parent.glob(f"{self.out.name}*"):  # an interrupted run leaves a longer name
            shutil.rmtree(path)
        os.sync()
        yield partial(self._run)

    def _run(self) -> None:
        try:
            self.runs.append(run_process(self.words))
        except subprocess.CalledProcessError as error:
            raise ProgramError(error.stderr) from error


class ProgramError(Exception):
    """A program failed; the message is the line of its output that names the error."""

    def __init__(self, stderr: str) -> None:
        lines = stderr.strip().splitlines() or ["it printed no error"]
        super().__init__(next((line for line in lines if line.startswith("error")), lines[-1]))


def run_process(words: Sequence[str]) -> ProcessRun:
    """Run a program to its end and sample its memory.

    Raises:
        subprocess.CalledProcessError: it failed; `stderr` is what it printed.
    """
    with ExitStack() as opened:
        out, err = (opened.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        began = time.perf_counter()
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        try:
            with MemoryWatch(process.pid) as watch:
                code = process.wait()
                seconds = time.perf_counter() - began
        except BaseException:
            process.kill()
            process.wait()
            raise
        for file in (out, err):
            file.seek(0)
        if code:
            raise subprocess.CalledProcessError(code, words, stderr=err.read())
        printed = _printed(out.read())
    return ProcessRun(
        seconds=printed.get("seconds", seconds),
        resident_bytes=max(watch.resident_bytes, int(printed.get("peak_bytes", 0))),
    )


class MemoryWatch:
    """Sampler of the resident memory of a process and its children (proc(5)).

    Attributes:
        resident_bytes: Sum of the peaks that the kernel keeps of each.
    """

    def __init__(self, process: int) -> None:
        self.resident_bytes = 0
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self.resident_bytes = max(self.resident_bytes, sum(map(_peak_bytes, _family(self._process))))


def _family(process: int) -> Iterator[int]:
    yield process
    try:
        children = (_PROC / f"{process}/task/{process}/children").read_text().split()
    except OSError:  # gone since
        return
    for child in children:
        yield from _family(int(child))


def _peak_bytes(process: int) -> int:
    """Return the peak resident memory of a process, 0 where it is gone."""
    try:
        lines = (_PROC / f"{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _printed(output: str) -> dict[str, float]:
    """Return the last line of a script of `reshard_contenders.py`; of other programs, nothing."""
    try:
        document = json.loads((output.strip().splitlines() or [""])[-1])
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
