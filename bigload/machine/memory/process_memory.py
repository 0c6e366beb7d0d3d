"""Memory of this process: resident now, sampled over a block of code, the kernel's peak, and trimming of the heap.

The kernel's high-water mark counts everything, torch's own libraries and pages of mapped files alike. A thread that
samples every few milliseconds tells private from file-backed memory, and subtracts what was resident before.
"""

from __future__ import annotations

import gc
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from bigload.machine.libc import libc
from bigload.machine.memory.ram import proc_sizes

_SELF = Path("/proc/self")
_INTERVAL_SECONDS = 0.005


class ResidentMemory(NamedTuple):
    """Resident memory of a process, in bytes: private, and pages of files or shared memory."""

    private_bytes: int
    file_bytes: int


def resident_memory(process: Path = _SELF) -> ResidentMemory:
    """Return what is resident now (proc(5)) in `process`, a folder of /proc; zeros where it is not reported."""
    sizes = proc_sizes(process / "status")
    return ResidentMemory(sizes.get("RssAnon", 0), sizes.get("RssFile", 0) + sizes.get("RssShmem", 0))


def reset_peak() -> None:
    """Restart the peak from what is resident now; where the system forbids it, the peak is since the start."""
    with suppress(OSError):
        (_SELF / "clear_refs").write_text("5", "utf-8")


def peak_bytes(process: Path = _SELF) -> int:
    """Return the largest resident set since the last reset, shared libraries and torch included."""
    return proc_sizes(process / "status").get("VmHWM", 0)


def trim_heap(*, collect_garbage: bool = False) -> None:
    """Return freed memory that the allocator keeps to the system (malloc_trim(3)): some 200 MiB after planning."""
    if collect_garbage:
        gc.collect()
    trim = getattr(libc, "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class MemorySampler:
    """Samples resident memory inside a `with` block; `peak` is the most above what was resident at its beginning.

    The private and the file-backed peak are taken separately and need not coincide. A last sample is taken on leaving
    the block, so the final state is always included.
    """

    def __init__(self) -> None:
        self._before = self._most = ResidentMemory(0, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._before = self._most = resident_memory()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._sample()

    @property
    def peak(self) -> ResidentMemory:
        """Return the peak above the beginning, in bytes."""
        return ResidentMemory(
            self._most.private_bytes - self._before.private_bytes, self._most.file_bytes - self._before.file_bytes
        )

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._sample()

    def _sample(self) -> None:
        now = resident_memory()
        self._most = ResidentMemory(
            max(now.private_bytes, self._most.private_bytes), max(now.file_bytes, self._most.file_bytes)
        )
