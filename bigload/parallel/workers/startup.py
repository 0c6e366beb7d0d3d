"""Start of a model's workers: processes, shared weights and the model in each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from bigload.parallel.workers.messages import pack
from bigload.parallel.workers.model_skeleton import Skeleton
from bigload.parallel.workers.pool import WorkerPool
from bigload.parallel.workers.rendezvous import WorkerRendezvous, environment, open_store
from bigload.parallel.workers.requests import ModelSetup, Start, WorkerReport
from bigload.parallel.workers.shared_weights import SharedMemory


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

    Args:
        skeleton: The model without its weights.
        shared: Weights of this process by number; they move into memory that workers share with it.
        setup: Divides and fills the model in each worker.
        num_workers: The number of workers.
        backend: `gloo` for the CPU, `nccl` for CUDA.
        daemon: Whether they are ended at once when this interpreter ends.
        timeout_seconds: The longest start.

    Raises:
        WorkerError, WorkerDiedError, WorkerTimeoutError: a worker failed.
    """
    num_threads = max(1, torch.get_num_threads() // num_workers)
    with ExitStack() as undo:
        store = undo.enter_context(open_store())
        memory = SharedMemory()
        undo.callback(memory.close)
        pool = WorkerPool(
            num_workers,
            environment=environment(num_workers, num_threads),
            inherit=(memory.descriptor, store),
            preload=(type(setup).__module__,),
            daemon=daemon,
        )
        undo_pool = undo.enter_context(ExitStack())
        undo_pool.callback(pool.end, "they could not be started")
        start = Start(
            rendezvous=WorkerRendezvous(
                store=store, backend=backend, size=num_workers, timeout_seconds=timeout_seconds
            ),
            skeleton=skeleton,
            shared=memory.share(shared),  # while the workers import torch
            setup=setup,
            default_dtype=torch.get_default_dtype(),
            num_threads=num_threads,
            seed=torch.initial_seed(),
        )
        reports = pool.ask(pack(start), "starting", timeout=timeout_seconds)
        undo_pool.pop_all()
    return pool, tuple(report for report in reports if isinstance(report, WorkerReport))
