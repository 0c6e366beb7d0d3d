"""One reshard by several processes, and what has to be true of one that goes on with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import bigload
from bigload.layouts.resharding.reshard import reshard
from bigload.layouts.writing import staging
from builders import contents
from thread_process_groups import outcomes

_PROGRAM = """
import os, sys, time
from bigload.layouts.resharding import rank_share
from bigload_cli import app

class SlowTally(rank_share.Tally):
    def add(self, num_bytes, *, phase, file):
        super().add(num_bytes, phase=phase, file=file)
        if os.environ.get("TELL") and phase == "write":
            with open(os.path.join(os.environ["TELL"], os.environ.get("RANK", "0")), "w") as told:
                told.write(str(os.getpid()))
            time.sleep(0.5)

rank_share.Tally = SlowTally
app.main()
"""
"""Writes slowly where another process waits to kill it, and tells it when to."""


def make_impatient(monkeypatch):
    """Have processes that wait for others give up soon."""
    monkeypatch.setattr(staging, "_SIGHT_SECONDS", 0.3)
    monkeypatch.setattr(staging, "_LEAVE_SECONDS", 0.3)


def run(source, out, team, **options):
    return reshard(source, out, threads=2, team=team, **options)


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def check_resumed(source, out, expected, size, *, run):
    """Go on with `size` processes, and find the bytes of one that was never interrupted."""
    reports = outcomes(size, lambda team: run(source, out, team, resume=True))
    assert [getattr(report, "out", report) for report in reports] == [out] * size
    assert contents(out) == expected
    assert entries(out.parent) == [out.name]
    return reports[0]


def _launch(size, *arguments, tell=None):
    """Start `bigload reshard` in `size` processes, under torchrun unless it is one."""
    launcher = () if size == 1 else ("-m", "torch.distributed.run", f"--nproc-per-node={size}", "--standalone")
    root = Path(bigload.__file__).parents[1]
    path = os.pathsep.join((str(root), str(root / "cli"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    if tell is not None:
        tell.mkdir()
        environment["TELL"] = str(tell)
    program = (sys.executable, *launcher) if size == 1 else (sys.executable, *launcher, "--no-python", sys.executable)
    command = [*program, "-c", _PROGRAM, "reshard", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(size, *arguments):
    """Run `bigload reshard` in `size` processes to its end; return its exit code and what it printed."""
    with _launch(size, *arguments) as process:
        output, errors = process.communicate(timeout=180)
    return process.returncode, output, errors


def run_until_killed(size, rank, *arguments, tell, number=signal.SIGKILL):
    """Run `bigload reshard` in `size` processes until process `rank` has written something, and kill that one."""
    with _launch(size, *arguments, tell=tell) as process:
        patience = time.monotonic() + 120
        while not (tell / str(rank)).is_file() or not (tell / str(rank)).read_text():
            assert time.monotonic() < patience
            time.sleep(0.01)
        os.kill(int((tell / str(rank)).read_text()), number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
