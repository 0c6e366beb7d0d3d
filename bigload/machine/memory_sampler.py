"""How much memory a load takes, private and file-backed told apart (proc(5), /proc/self/status).

The high-water mark of the kernel (`peak_memory.py`) counts everything, torch's own libraries and the pages of a mapped
file alike. A thread that looks every few milliseconds can tell them apart, and starts from what was held before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

_STATUS = Path("/proc/self/status")
_INTERVAL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Resident memory of a process, in bytes: its own, and pages of files or shared memory."""

    private_bytes: int
    file_bytes: int


def memory_use(status: Path = _STATUS) -> MemoryUse:
    """Return what this process holds now; zeros where the system does not tell."""
    found = {"RssAnon": 0, "RssFile": 0, "RssShmem": 0}
    for line in status.read_text().splitlines():
        key, _, value = line.partition(":")
        if key in found:
            found[key] = int(value.split()[0]) * 1024
    return MemoryUse(found["RssAnon"], found["RssFile"] + found["RssShmem"])


class MemorySampler:
    """Watches memory between entering and leaving a `with` block; `peak` is what was held above the beginning.

    The largest private and the largest file-backed amounts are noted apart, and need not fall on one moment. A last
    look is taken when the block is left, so what a load ends with is never missed.
    """

    def __init__(self) -> None:
        self._before = self._most = MemoryUse(0, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._before = self._most = memory_use()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._look()

    @property
    def peak(self) -> MemoryUse:
        """Return the most that was held above what was held before, in bytes."""
        return MemoryUse(
            self._most.private_bytes - self._before.private_bytes, self._most.file_bytes - self._before.file_bytes
        )

    def _watch(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        now = memory_use()
        self._most = MemoryUse(
            max(now.private_bytes, self._most.private_bytes), max(now.file_bytes, self._most.file_bytes)
        )
