"""Start of a model's workers: processes, shared weights, and the model in each.

Workers meet by a store in a file without a name, whose descriptor they inherit. Other users cannot open it, whereas a
TCPStore serves every user of the host. It is gone when the last worker has ended.

By what the store says, workers connect over the loopback interface. gloo and NCCL do not authenticate there: another
user of the host can connect to the port of a worker and make a start fail. What comes over these connections becomes
elements of tensors, and is never unpickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from bigload.parallel.workers.messages import pack
from bigload.parallel.workers.model_skeleton import Skeleton
from bigload.parallel.workers.pool import WorkerPool
from bigload.parallel.workers.requests import ModelSetup, Start, WorkerReport
from bigload.parallel.workers.shared_weights import memory_file, share_weights


def start_workers(
    skeleton: Skeleton,
    shared: Mapping[int, torch.Tensor],
    setup: ModelSetup,
    *,
    num_workers: int,
    backend: str,
    daemon: bool,
    timeout_seconds: float,
) -> tuple[WorkerPool, tuple[WorkerReport, ...]]:
    """Return workers that have built the model, and their reports. If one fails, none is left.

    Workers make the `skeleton`, which has no weights; they share the memory of `shared`, weights of this process by
    number, which move there; and `setup` divides and fills the model in each. `backend` is `gloo` for the CPU, `nccl`
    for CUDA; `daemon` has the end of this interpreter end them at once.
    """
    num_threads = max(1, torch.get_num_threads() // num_workers)
    with memory_file("bigload-store") as store, memory_file("bigload-weights") as memory, ExitStack() as undo:
        pool = WorkerPool(
            num_workers,
            environment=_environment(num_workers, num_threads),
            inherit=(memory, store),
            preload=(type(setup).__module__,),
            daemon=daemon,
        )
        undo.callback(pool.end, "they could not be started")
        start = Start(
            store=store,
            backend=backend,
            size=num_workers,
            timeout_seconds=timeout_seconds,
            skeleton=skeleton,
            shared=share_weights(memory, shared),  # while the workers import torch
            setup=setup,
            default_dtype=torch.get_default_dtype(),
            num_threads=num_threads,
            seed=torch.initial_seed(),
        )
        reports = pool.ask(pack(start), "starting", timeout=timeout_seconds)
        undo.pop_all()
    return pool, tuple(report for report in reports if isinstance(report, WorkerReport))


def _environment(size: int, num_threads: int) -> dict[str, str]:
    return {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": str(num_threads),
        # All are on this host. And gloo would look up the name of the host otherwise, which need not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }
