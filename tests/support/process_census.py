"""Census of this process for tests of leaks: children, descriptors, shared memory, files."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from patience import ends


@dataclass(frozen=True)
class Census:
    """What there is at a moment; equal if nothing came and nothing went."""

    children: frozenset
    descriptors: int
    shared_memory: frozenset
    files: frozenset


def census():
    return Census(
        children=frozenset(children()),
        descriptors=len(names_in("/proc/self/fd")),
        shared_memory=frozenset(name for name in names_in("/dev/shm") if not name.startswith("bigload-crash-")),
        files=names_in(tempfile.gettempdir()),
    )


def names_in(folder):
    return frozenset(path.name for path in Path(folder).iterdir())


def settled(before, *, seconds=2.0):
    """Return the census as soon as it is `before`; other processes may come and go in shared memory."""
    until = time.monotonic() + seconds
    while (found := census()) != before and time.monotonic() < until:
        time.sleep(0.02)
    return found


def children(of=None):
    """Return the processes that `of` (this process) has started, and those that they have, zombies too."""
    found = []
    for task in Path(f"/proc/{of or os.getpid()}/task").iterdir():
        try:
            found += [int(text) for text in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def is_running(process_id):
    """Return whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ended(process_ids, *, within=1.0):
    """Wait until none of the processes runs; return whether that was so within so many seconds."""
    until = time.monotonic() + within
    while any(map(is_running, process_ids)) and time.monotonic() < until:
        time.sleep(0.01)
    return not any(map(is_running, process_ids))


def run_program(program, *arguments):
    """Run the text or file `program` in a fresh interpreter that finds what this one does; return how it ended."""
    source = [program] if isinstance(program, Path) else ["-c", program]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *source, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            ((output, errors),) = ends([process])
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
