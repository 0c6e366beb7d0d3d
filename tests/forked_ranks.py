"""Real processes for tests: ranks forked from one that has imported torch, so that many cost little more than one.

A test file calls `run` with its own path and the name of a function in it; the function gets its rank, the number of
ranks and a folder for all, and returns what can be JSON. Each rank has the variables that torchrun would set for it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 100
"""Longer than anything here takes on a busy machine."""

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit status, minus the signal if one ended it; what it returned; what it wrote."""

    status: int
    returned: object
    errors: str


def run(program: str | Path, function: str, size: int, folder: Path, *, hosts: int = 1) -> list[End]:
    """Run `function` of the file `program` in `size` ranks on so many pretended hosts; return how each ended.

    Raises:
        AssertionError: a rank did not end.
    """
    command = [sys.executable, __file__, str(program), function, str(size), str(hosts), str(folder)]
    places = (ROOT, ROOT / "cli", ROOT / "tests", ROOT / "tests" / "support")
    path = os.pathsep.join((*map(str, places), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    said = "".join(path.read_text() for path in sorted(folder.glob("errors-*.txt")))
    assert done.returncode == 0, done.stderr[-4000:] + said
    ends = []
    for rank, status in enumerate(json.loads(done.stdout.splitlines()[-1])):
        returned = folder / f"returned-{rank}.json"
        value = json.loads(returned.read_text()) if returned.exists() else None
        ends.append(End(status, value, (folder / f"errors-{rank}.txt").read_text()))
    return ends


def returned_by_all(ends: list[End]) -> list[dict[str, object]]:
    """Return what the ranks returned, none of which failed."""
    assert [end.status for end in ends] == [0] * len(ends), "\n".join(end.errors for end in ends)
    return [end.returned for end in ends]


def main(program: str, function: str, size: int, hosts: int, folder: Path) -> None:
    import torch.distributed  # noqa: F401 - once for all ranks

    called = runpy.run_path(program, run_name="ranks")[function]
    children = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            be_rank(called, rank, size, hosts, folder)
        children.append(pid)
    sys.stdout.write(json.dumps([status_of(pid) for pid in ended(children)]))


def be_rank(called, rank: int, size: int, hosts: int, folder: Path) -> None:
    status = 1
    try:
        errors = os.open(folder / f"errors-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        faulthandler.dump_traceback_later(PATIENCE_SECONDS * 0.9)  # where it hangs
        local_size = size // hosts
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"LOCAL_RANK": str(rank % local_size), "GROUP_RANK": str(rank // local_size)}
        value = called(rank, size, folder)
        (folder / f"returned-{rank}.json").write_text(json.dumps(value))
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


_statuses: dict[int, int] = {}


def ended(children: list[int]) -> list[int]:
    """Wait for all, and end what does not end by itself; who was killed stays a zombie meanwhile."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    for pid in reversed(children):
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"rank {children.index(pid)} hangs: {_stop(children)}")
            time.sleep(0.02)
    return children


def _stop(children: list[int]) -> str:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    return "all were killed"


def status_of(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
