"""Rank processes for tests: forked from one process per session that has imported torch, so that many cost little.

As a program it is that process: it reads requests from its standard input, one line of JSON each, and forks a process
for each request, which forks the ranks, waits for them and writes their results.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

TIMEOUT_SECONDS = 60
"""Longer than anything here takes on a busy machine: a rank that still runs then waits forever."""

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class RankResult:
    """End of a rank: its exit status, minus the signal if one ended it; what it returned; what it wrote to stderr."""

    status: int
    returned: object
    errors: str


def run_ranks(size: int, function, *arguments: object, patience_seconds: int = TIMEOUT_SECONDS) -> list[object]:
    """Call `function(*arguments)` in `size` ranks of a process group; return for each a value, or its end as text.

    A rank that still runs after `patience_seconds` is killed.
    """
    request = {"file": sys.modules[function.__module__].__file__, "name": function.__name__, "arguments": arguments}
    with tempfile.TemporaryDirectory() as folder:
        return [_outcome(each) for each in _run(request, size, Path(folder), patience_seconds, has_group=True)]


def _outcome(result: RankResult) -> object:
    if result.status < 0:
        return signal.Signals(-result.status).name
    return result.errors if result.returned is None and result.status else result.returned


def run_launched(program: str, function: str, size: int, folder: Path, *, hosts: int = 1) -> list[RankResult]:
    """Call `function(rank, size, folder)` of the file `program` in ranks with the variables that torchrun would set.

    Raises:
        AssertionError: a rank did not end.
    """
    request = {"file": str(program), "name": function, "hosts": hosts}
    return _run(request, size, folder, 100, has_group=False)


def returned_by_all(results: list[RankResult]) -> list[dict[str, object]]:
    """Return what the ranks returned, none of which failed."""
    assert [each.status for each in results] == [0] * len(results), "\n".join(each.errors for each in results)
    return [each.returned for each in results]


def _run(request: dict, size: int, folder: Path, timeout: int, *, has_group: bool) -> list[RankResult]:
    request |= {"size": size, "folder": str(folder), "timeout": timeout, "has_group": has_group}
    request["environment"] = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = _server()
    server.stdin.write(json.dumps(request, default=str) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that forks ranks has ended"
    statuses = json.loads(answer)
    assert isinstance(statuses, list), statuses
    results = []
    for rank, status in enumerate(statuses):
        returned, errors = folder / f"returned-{rank}.json", folder / f"errors-{rank}.txt"
        value = json.loads(returned.read_text()) if returned.exists() else None
        results.append(RankResult(status, value, errors.read_text() if errors.exists() else ""))
    hanging = [rank for rank, status in enumerate(statuses) if status == -signal.SIGALRM]
    assert not hanging, f"ranks {hanging} hang: {[each.errors for each in results]}"
    return results


@cache
def _server() -> subprocess.Popen:
    folders = (ROOT, ROOT / "cli", ROOT / "tests" / "support", ROOT / "tests")
    path = os.pathsep.join((*map(str, folders), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(_stop, server)
    return server


def _stop(server: subprocess.Popen) -> None:
    server.kill()  # it is idle; end of file may not come, as forks of tests have the pipe too
    server.wait()
    server.stdin.close()
    server.stdout.close()


# The process that forks


def main() -> None:
    import torch._dynamo  # before the forks, once for all: what models and their divisions import
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel  # noqa: F401

    import bigload.parallel.sharded_loading.load_sharded  # noqa: F401

    for line in sys.stdin:
        request = json.loads(line)
        function = getattr(_module(request["file"]), request["name"])
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _serve(request, function, writing)
        os.close(writing)
        with os.fdopen(reading) as answers:
            answer = answers.read()
        os.waitpid(child, 0)
        sys.stdout.write((answer or '"the ranks could not be run"') + "\n")
        sys.stdout.flush()


@cache
def _module(file: str) -> ModuleType:
    """Return the module of tests in `file`, which is imported before the forks, once for all as well."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(request: dict, function, writing: int) -> None:
    """Fork the ranks of `request`, wait for them, and write their exit statuses."""
    try:
        os.set_inheritable(writing, False)
        os.dup2(2, 1)  # standard output has the answers
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.environ.clear()
        os.environ.update(request["environment"])
        ranks = [_fork(rank, function, request, writing) for rank in range(request["size"])]
        statuses = _statuses(ranks, request["timeout"])
        os.write(writing, json.dumps(statuses).encode())
    except BaseException:
        os.write(writing, json.dumps(traceback.format_exc()).encode())
    finally:
        os._exit(0)


def _fork(rank: int, function, request: dict, writing: int) -> int:
    child = os.fork()
    if child:
        return child
    status, folder = 1, Path(request["folder"])
    try:
        os.close(writing)
        errors = os.open(folder / f"errors-{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        faulthandler.dump_traceback_later(request["timeout"] * 0.9)  # where it hangs
        if request["has_group"]:
            import torch.distributed as dist

            store = dist.FileStore(str(folder / "store"), request["size"])
            dist.init_process_group("gloo", store=store, rank=rank, world_size=request["size"])
            value = function(*request["arguments"])
        else:
            local_size = request["size"] // request["hosts"]
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(request["size"])}
            os.environ |= {"LOCAL_RANK": str(rank % local_size), "GROUP_RANK": str(rank // local_size)}
            value = function(rank, request["size"], folder)
        (folder / f"returned-{rank}.json").write_text(json.dumps(value))
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)  # not by way of the interpreter's end: threads may still wait in gloo for a dead rank


def _statuses(ranks: list[int], timeout: float) -> list[int]:
    """Wait for all ranks; a killed one stays a zombie meanwhile. Those that do not end get SIGALRM as their status."""
    hanging = set(ranks)
    while hanging and timeout > 0:
        looked = time.monotonic()
        hanging = {pid for pid in hanging if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None}
        time.sleep(0.005)
        timeout -= min(time.monotonic() - looked, 1)  # a machine that stood still says nothing of ranks
    for pid in hanging:
        os.kill(pid, signal.SIGKILL)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    return [-signal.SIGALRM if pid in hanging else status for pid, status in zip(ranks, statuses, strict=True)]


if __name__ == "__main__":
    main()
