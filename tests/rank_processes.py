"""Real processes with a process group of gloo: an interpreter that has imported torch forks one for each rank.

As a program it is that interpreter. Each rank calls one function of one file, and what it returns comes back as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

PATIENCE_SECONDS = 60
"""Longer than anything here takes on a busy machine: who is still there then waits forever."""


def run_ranks(size: int, function, *arguments: object, patience_seconds: int = PATIENCE_SECONDS) -> list[object]:
    """Have `size` processes call `function(*arguments)`, and return what each gave: a value, or how it ended in text.

    Fails if one of them is still there after `patience_seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = sys.modules[function.__module__].__file__
        asked = {"file": file, "name": function.__name__, "arguments": arguments, "size": size, "folder": folder}
        asked["patience"] = patience_seconds
        command = [sys.executable, __file__, json.dumps(asked, default=str)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # other helpers, for what `file` imports
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=2 * patience_seconds, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout)


def main() -> None:
    """Fork the ranks, wait for all of them and print what they gave."""
    asked = json.loads(sys.argv[1])
    import torch._dynamo  # before the forks, once for all: what models and their divisions import
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel

    import bigload.parallel.sharded_loading.load_sharded  # noqa: F401

    spec = importlib.util.spec_from_file_location("asked", asked["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    function = getattr(module, asked["name"])
    ranks = [_fork(rank, function, asked) for rank in range(asked["size"])]
    endings = _wait(ranks, Path(asked["folder"]), asked["patience"])
    sys.stdout.write(json.dumps(endings))


def _fork(rank: int, function, asked) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        import torch.distributed as dist

        folder = Path(asked["folder"])
        store = dist.FileStore(str(folder / "store"), asked["size"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=asked["size"])
        result = function(*asked["arguments"])
        (folder / f"{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:
        (Path(asked["folder"]) / f"{rank}.json").write_text(json.dumps(traceback.format_exc()))
    finally:
        os._exit(code)  # not by way of the interpreter's end: threads may still wait in gloo for who is gone


def _wait(ranks: list[int], folder: Path, patience_seconds: int) -> list[object]:
    endings: list[object] = ["it waits forever"] * len(ranks)
    waiting = set(range(len(ranks)))
    deadline = time.monotonic() + patience_seconds
    while waiting and time.monotonic() < deadline:
        for rank in list(waiting):
            process, status = os.waitpid(ranks[rank], os.WNOHANG)
            if process:
                waiting.remove(rank)
                endings[rank] = _ending(status, folder / f"{rank}.json")
        time.sleep(0.005)
    for rank in waiting:
        os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)
    return endings


def _ending(status: int, told: Path) -> object:
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return json.loads(told.read_text())


if __name__ == "__main__":
    main()
