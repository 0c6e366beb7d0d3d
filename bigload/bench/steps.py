"""Progress of a bench, reported before each step; nothing is printed while a step is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from bigload.bench.runner import Clock
from bigload.units import GIB, format_size

WORTH_TELLING_BYTES = GIB
"""A bench of less is over in seconds."""


@dataclass(eq=False)
class Steps:
    """Adds the bytes that are through, and the time left, to the words before each step."""

    on_run: Callable[[str], None]
    total_bytes: int
    step_bytes: int
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._began = self.clock()
        self._done_bytes = 0

    def begin(self, words: str) -> None:
        """Say that a step begins; those before it are through."""
        done, total = self._done_bytes, self.total_bytes
        self._done_bytes += self.step_bytes
        if not done or total < WORTH_TELLING_BYTES or done >= total:  # the first may be refused for lack of memory
            self.on_run(words)
        else:
            left = (self.clock() - self._began) * (total - done) / done
            self.on_run(f"{words}, {format_size(done)} of {format_size(total)}, {_duration(left)} left")


def _duration(seconds: float) -> str:
    """Return a time as people estimate it: `about 40 s`, `about 3 min`, `about 2 h 10 min`."""
    if seconds < 90:
        return f"about {max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 90 else f"about {minutes // 60} h {minutes % 60} min"
