"""Run a command within a limit on its memory, page cache included: a control group, or a scope of systemd."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class NoMemoryGroupError(Exception):
    """Neither control groups nor systemd let this process limit the memory of another."""


def run_within(command: Sequence[str], limit_bytes: int) -> str:
    """Run `command` in at most `limit_bytes` of memory, and return what it printed.

    Pages of files count that the command is the first to read; those of libraries in use are charged to others.

    Raises:
        NoMemoryGroupError: the limit cannot be set.
        subprocess.CalledProcessError: the command failed. Without memory that is by signal 9.
    """
    with _limited(command, limit_bytes) as limited:
        return subprocess.run(limited, check=True, stdout=subprocess.PIPE, text=True).stdout


@contextmanager
def _limited(command: Sequence[str], limit_bytes: int) -> Iterator[list[str]]:
    group = _own_group() / f"bigload-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        if (program := shutil.which("systemd-run")) is None:
            raise NoMemoryGroupError(f"no control group can be made at {group}, and there is no systemd-run") from None
        bounds = ("-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0")
        yield [program, "--scope", "--quiet", *([] if os.geteuid() == 0 else ["--user"]), *bounds, *command]
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield ["/bin/sh", "-c", f'echo $$ > "{group / "cgroup.procs"}" && exec "$@"', "sh", *command]
    finally:
        group.rmdir()


def _own_group() -> Path:
    """Return the folder of this process's memory group of version 1: in version 2 a group with processes has none."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory") / path.lstrip("/")
    return Path("/sys/fs/cgroup/memory")
