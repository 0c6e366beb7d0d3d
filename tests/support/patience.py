"""Waits for processes of a test, with an end.

They count in looks of a second and not by a clock: a machine that stood still says nothing of its processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from select import select

TIMEOUT_SECONDS = 120
"""Longer than anything here takes on a busy machine: a process that still runs then waits forever.

So does torchrun where its own ranks are done and one of another host has failed: it waits 300 s for all to finish."""


def wait_for_line(processes: Sequence[subprocess.Popen], line: str) -> None:
    """Wait until each of `processes` has written `line`, its next one; what follows is left to `ends`.

    Raises:
        AssertionError: a process wrote something else, or nothing.
    """
    patience = TIMEOUT_SECONDS
    for number, process in enumerate(processes):
        written = b""
        while patience > 0 and not written.endswith(b"\n"):
            if not select([process.stdout], [], [], 1)[0]:
                patience -= 1
            elif byte := os.read(process.stdout.fileno(), 1):  # a buffer would keep from `ends` what it has read
                written += byte
            else:
                break
        if written.decode() != f"{line}\n":
            ends(processes)
            raise AssertionError(f"process {number} of these said {written!r}, not {line!r}")


def ends(processes: Sequence[subprocess.Popen]) -> list[tuple[str, str]]:
    """Wait for `processes`, and return what each wrote to its output and its errors; its status is in `returncode`.

    It is written to the output of the test too, which pytest shows if it fails.

    Raises:
        AssertionError: a process did not end.
    """
    written, waiting = [], []
    patience = TIMEOUT_SECONDS
    for process in processes:
        ended = None
        while ended is None:
            try:
                ended = process.communicate(timeout=1)
            except subprocess.TimeoutExpired as wait:
                patience -= 1
                if patience <= 0:  # the test ends it
                    waiting.append(len(written))
                    ended = tuple((text or b"").decode() for text in (wait.output, wait.stderr))
        written.append(ended)
    for number, (process, (output, errors)) in enumerate(zip(processes, written, strict=True)):
        status = f"process {number} of these, with status {process.returncode}"
        sys.stdout.write(f"{status}, wrote to its output:\n{output}\nand to its errors:\n{errors}\n")
    assert not waiting, f"processes {waiting} of these wait forever, or for a rank that failed"
    return written
