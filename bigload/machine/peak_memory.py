"""The largest amount of memory that this process held over a stretch of time (proc(5))."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_SELF = Path("/proc/self")


def reset_peak() -> None:
    """Let the peak start again from what is held now; where the system forbids it, the peak is since the start."""
    with suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the largest resident set since the last reset, shared libraries and torch included."""
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
