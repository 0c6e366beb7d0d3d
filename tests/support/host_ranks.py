"""Ranks on the hosts of `network_hosts.py`: under torchrun, or with the variables of a launcher that watches nobody.

As a program it is one rank: it calls a function of a file with arguments, and writes what that returned.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from network_hosts import Host
from patience import TIMEOUT_SECONDS, ends

ROOT = Path(__file__).parents[2]
SILENCE_SECONDS = 4
"""How long a host of tests may answer nothing: bigload's own limit is a minute."""

_PATH = (ROOT, ROOT / "cli", ROOT / "tests" / "support", ROOT / "tests")
_RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-endpoint=host-0:29500", "--rdzv-conf=last_call_timeout=1")
_STATIC = ("--master-addr=host-0", "--master-port=29500")


def torchrun(
    hosts: Sequence[Host], *command: object, per_host: int = 1, is_static: bool = False, **environment: str
) -> list[subprocess.Popen]:
    """Start torchrun on each host, which starts `command` in `per_host` processes there.

    With `is_static`, the hosts are numbered beforehand, and torchrun does not watch the other ones.
    """
    options = ("--nnodes", len(hosts), "--nproc-per-node", per_host, "--no-python")
    return [
        host.start(
            *(sys.executable, "-m", "torch.distributed.run", *options),
            *((*_STATIC, "--node-rank", number) if is_static else _RENDEZVOUS),
            *command,
            **_environment(),
            **environment,
        )
        for number, host in enumerate(hosts)
    ]


def launched(hosts: Sequence[Host], *command: object, **environment: str) -> list[subprocess.Popen]:
    """Start `command` in one process of each host, with the variables that torchrun would set, and nothing besides."""
    group = {"WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": "host-0", "MASTER_PORT": "29500"}
    return [
        host.start(*command, **_environment(), **group, RANK=str(number), **environment)
        for number, host in enumerate(hosts)
    ]


def rank_command(function, *arguments: object, is_joined: bool = True) -> list[object]:
    """Return the command of a rank that calls `function(*arguments)`, `is_joined`: in the default process group."""
    file = sys.modules[function.__module__].__file__
    return [sys.executable, __file__, file, function.__name__, int(is_joined), json.dumps(arguments, default=str)]


def returned(processes: Sequence[subprocess.Popen]) -> dict[int, object]:
    """Wait for `processes`, and return what their ranks returned, by rank: those that wrote it before their end.

    Raises:
        AssertionError: a process did not end.
    """
    lines = [line for output, _ in ends(processes) for line in output.splitlines() if line.startswith("returned ")]
    found = (line.split(" ", 2)[1:] for line in lines)
    return {int(rank): json.loads(value) for rank, value in found}


def _environment() -> dict[str, str]:
    path = os.pathsep.join((*map(str, _PATH), os.environ.get("PYTHONPATH", "")))
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


# A rank


def main() -> None:
    """Call the function that the arguments name."""
    faulthandler.dump_traceback_later(TIMEOUT_SECONDS * 0.9)  # where it hangs
    import torch.distributed as dist

    from bigload.distributed import connections

    connections.SILENCE_SECONDS = int(os.environ.get("SILENCE_SECONDS", SILENCE_SECONDS))
    file, name, is_joined, arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("on_hosts", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if int(is_joined):
        dist.init_process_group("gloo")
    value = getattr(module, name)(*json.loads(arguments))
    sys.stdout.write(f"returned {os.environ['RANK']} {json.dumps(value)}\n")
    sys.stdout.flush()
    os._exit(0)  # not by way of the interpreter's end: threads may still wait in gloo for a rank that is gone


if __name__ == "__main__":
    main()
