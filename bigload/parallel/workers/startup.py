"""Workers of a model, from nothing until all are ready."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bigload.loading.methods import Method
from bigload.parallel.tensor_parallel.plan import TensorParallelPlan
from bigload.parallel.workers.messages import pack
from bigload.parallel.workers.model_skeleton import Skeleton
from bigload.parallel.workers.pool import WorkerPool
from bigload.parallel.workers.rendezvous import Meeting, environment, open_store
from bigload.parallel.workers.requests import Start, WorkerReport
from bigload.parallel.workers.shared_weights import WeightSharing


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedWorkers:
    """Workers that are to be started; see `parallelize` and `Start` for what is said here."""

    num_workers: int
    skeleton: Skeleton
    plan: TensorParallelPlan
    checkpoint: Path | None
    method: Method | str | None
    dtype: torch.dtype | None
    backend: str
    daemon: bool
    timeout_seconds: float


def start_workers(
    wanted: WantedWorkers, shared: Mapping[int, torch.Tensor]
) -> tuple[WorkerPool, tuple[WorkerReport, ...]]:
    """Return workers that are ready, and how they started. If one fails, none is left.

    `shared` are weights that they get from this process, by number; they move into memory that all have.

    Raises:
        WorkerError, WorkerDiedError, WorkerTimeoutError: a worker failed.
    """
    num_threads = max(1, torch.get_num_threads() // wanted.num_workers)
    with ExitStack() as undo:
        store = undo.enter_context(open_store())
        sharing = WeightSharing()
        undo.callback(sharing.close)
        pool = WorkerPool(
            wanted.num_workers,
            environment=environment(wanted.num_workers, num_threads),
            inherit=(sharing.descriptor, store),
            daemon=wanted.daemon,
        )
        undo_pool = undo.enter_context(ExitStack())
        undo_pool.callback(pool.end, "they could not be started")
        start = Start(
            meeting=Meeting(
                store=store,
                backend=wanted.backend,
                size=wanted.num_workers,
                timeout_seconds=wanted.timeout_seconds,
            ),
            skeleton=wanted.skeleton,
            plan=wanted.plan,
            shared=sharing.share(shared),
            checkpoint=wanted.checkpoint,
            method=wanted.method,
            dtype=wanted.dtype,
            default_dtype=torch.get_default_dtype(),
            num_threads=num_threads,
            seed=torch.initial_seed(),
        )
        answers = pool.ask(pack(start), "starting", timeout=wanted.timeout_seconds)
        undo_pool.pop_all()
    return pool, tuple(each for each in answers if isinstance(each, WorkerReport))
