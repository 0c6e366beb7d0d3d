"""Measure plans of remote checkpoints on a loopback Hub with a latency, and print the goals beside them.

    python benchmarks/bench_remote.py [--runs 3] [--latency 0.05]

Each run is a whole process of the command line. Cold: nothing is cached. Warm: the same command again. Local: the same
files as a folder. Memory is the process's peak above that of an interpreter that does nothing. The server is in this
process and shares the cores, so seconds of a busy machine are too long; compare those of one run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import show_status
from hub_server import HubServer
from make import load_recipe, make

BIGLOAD = str(Path(sys.executable).with_name("bigload"))
MEMORY = ("-m", "cuda:0=80GiB", "-m", "cuda:1=80GiB", "-m", "cpu=64GiB")
DATA_SECONDS = 0.02
"""A line that sends for longer than this sends weights, no headers."""

GOALS = {"llama-70b": "cold <= 1.0 s, <= 5 MB", "deepseek-v3": "cold <= 3 s, <= 64 MiB above the interpreter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRun:
    """One process: its seconds, those on a core, its peak memory, and what it asked the server for.

    Attributes:
        before: Seconds before the line began to send data; all of them, where it has no bandwidth.
        idle: Seconds between then and the last byte in which it sent nothing.
        after: Seconds after the last byte.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    requests: int
    num_bytes: int
    before: float
    idle: float
    after: float


def main() -> None:
    """Make the checkpoints, serve them and time the commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--latency", type=float, default=0.05, help="seconds before each answer")
    parser.add_argument("--models", nargs="+", default=list(GOALS))
    arguments = parser.parse_args()
    idle = [sys.executable, "-c", "pass"]
    with tempfile.TemporaryDirectory() as folder, HubServer(latency=arguments.latency, hashes=False) as hub:
        print(f"bigload plan, {arguments.latency * 1000:.0f} ms latency, {arguments.runs} runs")
        for name in arguments.models:
            make(load_recipe(name), Path(folder, name), data="sparse")
            hub.add(f"org/{name}", Path(folder, name), lfs_bytes=10 << 20)
            runs: dict[str, list[RemoteRun]] = {"cold": [], "warm": [], "local": []}
            for index in range(arguments.runs):
                cache = Path(folder, f"cache-{name}-{index}")
                environment = {**os.environ, **hub.environment(cache)}
                nothing = run(hub, idle, environment).peak_bytes
                show_status(f"{name}, run {index + 1} of {arguments.runs}")
                for case, path in (("cold", f"org/{name}"), ("warm", f"org/{name}"), ("local", f"{folder}/{name}")):
                    runs[case].append(run(hub, [BIGLOAD, "plan", path, *MEMORY], environment))
            show_status("")
            print(f"{name}   goal: {GOALS.get(name, '-')}; warm: no request, local + 50 ms")
            for case, found in runs.items():
                print(f"  {case:6} {in_words(found, nothing)}")


def run(hub: HubServer, command: list[str], environment: dict[str, str]) -> RemoteRun:
    """Run a command to its end, its words unseen."""
    hub.requests.clear()
    hub.busy.clear()
    began = time.monotonic()
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        text = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}: {text}")
    ended = time.monotonic()
    data = [(start, stop) for start, stop in hub.busy if stop - start > DATA_SECONDS]
    first, last = (data[0][0], data[-1][1]) if data else (ended, ended)
    return RemoteRun(
        seconds=ended - began,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=usage.ru_maxrss * 1024,
        requests=len(hub.requests),
        num_bytes=hub.num_bytes,
        before=first - began,
        idle=last - first - sum(stop - start for start, stop in data),
        after=ended - last,
    )


def in_words(runs: list[RemoteRun], idle_bytes: int) -> str:
    """Return the median and range of seconds, and the most of everything else."""
    seconds = [each.seconds for each in runs]
    above = (max(each.peak_bytes for each in runs) - idle_bytes) / 2**20
    return (
        f"median {statistics.median(seconds):6.3f} s  ({min(seconds):.3f} … {max(seconds):.3f})"
        f"  cpu {min(each.cpu_seconds for each in runs):6.3f} s  {above:5.0f} MiB"
        f"  {max(each.requests for each in runs):4} requests"
        f"  {max(each.num_bytes for each in runs) / 1e6:6.2f} MB"
    )


if __name__ == "__main__":
    main()
