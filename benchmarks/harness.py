"""Shared harness of the benchmark scripts: rounds in rotating order, goals, the machine.

Loads and forwards inside this process use `bigload.bench.runner.run_rounds`, which also controls the page cache and
measures memory; `in_rounds` is for everything else, for example whole processes.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from bigload.bench.runner import rotated
from bigload.errors import NotEnoughSpaceError
from bigload.units import format_size

for _folder in ("fixtures", "tests/support"):  # scripts import `make` and `hub_server` after this module
    sys.path.append(str(Path(__file__).parents[1] / _folder))
Result = TypeVar("Result")
_SECONDS_BETWEEN_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal and its measurement: `value` has to be at least `bound`, or at most that."""

    text: str
    value: float
    bound: float
    is_least: bool = True
    unit: str = "x"

    @property
    def is_reached(self) -> bool:
        """Whether the goal is met."""
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    def __str__(self) -> str:
        shown = [f"{number:.2f} {self.unit}" for number in (self.value, self.bound)]
        verdict = "reached    " if self.is_reached else "NOT reached"
        return f"{verdict} {self.text}: {shown[0]} (goal: at {'least' if self.is_least else 'most'} {shown[1]})"


def in_rounds(contenders: Mapping[str, Callable[[], Result]], *, rounds: int) -> dict[str, list[Result]]:
    """Call all contenders in rotating order and return their results; those of a first round are dropped."""
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in rotated(list(contenders), number):
            result = contenders[name]()
            if number:
                results[name].append(result)
    return results


def timed(
    work: Callable[[], object], *, repeats: int = 1, synchronize: Callable[[], object] = lambda: None
) -> Callable[[], float]:
    """Return a function that runs `work` and returns its seconds, the mean of `repeats` runs."""

    def run() -> float:
        synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            work()
        synchronize()
        return (time.perf_counter() - began) / repeats

    return run


class _Status:
    """Line that names the current step: overwritten on a terminal, elsewhere printed every 30 seconds."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def __call__(self, text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text[:79]}\r", end="", file=sys.stderr, flush=True)
        elif text and time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            print(f"  {text}", file=sys.stderr, flush=True)
            self._printed = time.monotonic()


show_status: Callable[[str], None] = _Status()
"""Show the current step: on a terminal on one line that the next step overwrites, else in a line every 30 seconds."""


def installed_version(package: str) -> str | None:
    """Return the installed version of a package, `None` where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def folder_beside(root: Path, prefix: str, needed_bytes: int, opened: ExitStack) -> Path:
    """Return a new folder on the disk of the checkpoint at `root`, removed when `opened` closes.

    Raises:
        NotEnoughSpaceError: that disk has less than `needed_bytes` free.
    """
    beside = root.resolve().parent
    free = shutil.disk_usage(beside).free
    if needed_bytes > free:
        raise NotEnoughSpaceError(beside, needed_bytes=needed_bytes, free_bytes=free)
    return Path(opened.enter_context(tempfile.TemporaryDirectory(prefix=prefix, dir=beside)))


def machine() -> dict[str, object]:
    """Return the hardware and software that figures depend on."""
    return {
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "memory": format_size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "Linux": platform.release(),
        "Python": platform.python_version(),
    }


def processor() -> str:
    """Return the model name of the processor."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
