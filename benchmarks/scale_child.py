"""One measured work of `bench_scale.py` in a process of its own: `scale_child.py KIND JSON REPORT`.

CPU time and the peak of resident memory are those of the work alone: imports come before.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

DESCRIPTORS = 256
Work = Callable[[], object]


def main() -> None:
    """Prepare the work, run it, and write what it took to REPORT."""
    kind, arguments, report = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    work = KINDS[kind](**json.loads(arguments))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    resident, began, cpu = status_bytes("VmRSS"), time.perf_counter(), time.process_time()
    work()
    taken = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - began}
    taken["memory"] = max(0, status_bytes("VmHWM") - resident)
    Path(report).write_text(json.dumps(taken), encoding="utf-8")
    os._exit(0)  # freeing a million tensors one by one is no part of it


def status_bytes(field: str) -> int:
    """Return a size in /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def command(words: list[str]) -> Work:
    """Return a run of the command line."""
    from bigload_cli.app import main as bigload

    def run() -> None:
        sys.argv = ["bigload", *words]
        try:
            bigload()
        except SystemExit as exit_:
            if exit_.code:
                raise

    return run


def load(path: str, method: str | None = None) -> Work:
    """Return a load of all tensors."""
    import bigload

    bigload.load(next(Path(path).parent.glob("warm-up")), method=method)  # imports, thread pools
    held: list[object] = []
    return lambda: held.append(bigload.load(path, method=method, populate=False))


def load_sharded(path: str, rank: int, size: int, meeting: str) -> Work:
    """Return a load of this rank's rows; ranks begin together."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from bench_ranks import by_rows, empty
    from bigload.checkpoint.source import open_checkpoint
    from bigload.parallel.sharded_loading.load_sharded import load_sharded as loaded

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    checkpoint = open_checkpoint(path)
    model: nn.Module = by_rows(empty(checkpoint), checkpoint)
    dist.barrier()

    def run() -> None:
        loaded(model, path)
        with contextlib.suppress(RuntimeError):
            dist.barrier()

    return run


KINDS: Mapping[str, Callable[..., Work]] = {"command": command, "load": load, "load_sharded": load_sharded}

if __name__ == "__main__":
    main()
