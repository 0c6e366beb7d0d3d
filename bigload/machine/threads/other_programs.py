"""CPU time that this process and its children do not use, by the counts of the kernel (proc(5), `/proc/stat`)."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bigload.machine.threads.thread_pool import usable_cores

_PROC = Path("/proc")
_USER, _NICE, _SYSTEM, _STOLEN = 0, 1, 2, 7
"""Fields of the line `cpu`; interrupts are left out, which a program's own reads cause."""


class OtherPrograms:
    """Measures other programs, and a host that runs other machines, from now on."""

    def __init__(self, *, proc: Path = _PROC) -> None:
        self._proc = proc
        self._began = time.perf_counter()
        self._before = self._seconds()

    def busy_cores(self) -> float | None:
        """Return how many cores they have kept busy on average; `None` where the kernel does not say."""
        now, wall = self._seconds(), time.perf_counter() - self._began
        if now is None or self._before is None or not wall:
            return None
        return max(now - self._before, 0.0) / wall

    def disturb(self) -> bool:
        """Return whether they have used a tenth of the cores of this process, so that measurements say little."""
        return (self.busy_cores() or 0.0) >= usable_cores() / 10

    def _seconds(self) -> float | None:
        own = os.times()
        try:
            fields = (self._proc / "stat").read_text("utf-8").splitlines()[0].split()[1:]
            used = sum(int(fields[number]) for number in (_USER, _NICE, _SYSTEM, _STOLEN))
        except (OSError, ValueError, IndexError):
            return None
        mine = own.user + own.system + own.children_user + own.children_system
        return used / os.sysconf("SC_CLK_TCK") - mine
