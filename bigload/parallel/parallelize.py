"""Run a model in several processes, each of which has a part of every layer: parallelformers' `parallelize`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from bigload.errors import ParallelOptionError
from bigload.parallel.meeting import Meeting, environment, open_store
from bigload.parallel.messages import pack
from bigload.parallel.parallel_model import ParallelModel, ParallelReport
from bigload.parallel.pool import WorkerPool
from bigload.parallel.requests import Start, WorkerReport
from bigload.parallel.skeleton import Skeleton, skeleton_of
from bigload.parallel.weight_sharing import WeightSharing
from bigload.units import format_size

StrPath = str | os.PathLike[str]

_BACKENDS = ("nccl", "gloo")
_DEFAULT_METHODS = ("forward", "generate")
_VERBOSE = (None, "none", "simple", "detail")
_log = logging.getLogger("bigload.parallel")


def parallelize(
    model: nn.Module,
    num_gpus: int,
    fp16: bool = False,
    custom_policies: object = None,
    master_addr: str = "127.0.0.1",
    master_port: int | None = None,
    backend: str = "nccl",
    verbose: str | None = None,
    init_method: str = "spawn",
    daemon: bool = True,
    *,
    checkpoint: StrPath | None = None,
    methods: Sequence[str] = _DEFAULT_METHODS,
    timeout: float | None = None,
    start_timeout: float = 600.0,
) -> ParallelModel:
    """Spread `model` over `num_gpus` workers, in which its methods run from now on, and return what undoes that."""
    began = time.perf_counter()
    _check(model, num_gpus, backend, init_method, verbose, timeout, start_timeout)
    called = _methods(model, methods)
    skeleton, weights = skeleton_of(model)
    shared = _to_share(skeleton, weights, checkpoint)
    num_threads = max(1, torch.get_num_threads() // num_gpus)
    with ExitStack() as undo:
        store = open_store(master_addr, master_port)
        sharing = WeightSharing()
        undo.callback(sharing.close)
        pool = WorkerPool(
            num_gpus,
            environment=environment(master_addr, backend, num_gpus, num_threads),
            inherit=(sharing.descriptor,),
            daemon=daemon,
        )
        undo.callback(pool.close)
        start = Start(
            meeting=Meeting(
                address=master_addr, port=store.port, backend=backend, size=num_gpus, timeout_seconds=start_timeout
            ),
            skeleton=skeleton,
            plan=None,
            shared=sharing.share(shared),
            checkpoint=None if checkpoint is None else Path(checkpoint).absolute(),
            dtype=torch.float16 if fp16 else None,
            default_dtype=torch.get_default_dtype(),
            num_threads=num_threads,
            seed=torch.initial_seed(),
        )
        answers = pool.ask(pack(start), "starting", timeout=start_timeout)
        undo.pop_all()
    sharing.close()
    workers = tuple(each for each in answers if isinstance(each, WorkerReport))
    report = ParallelReport(workers=workers, notes=(), seconds=time.perf_counter() - began)
    return ParallelModel(model, pool, report, methods=called, timeout=timeout, resources=store)


def _check(model, num_gpus, backend, init_method, verbose, timeout, start_timeout) -> None:
    pass


def _methods(model: nn.Module, methods: Sequence[str]) -> list[str]:
    return [m for m in methods if hasattr(model, m)]


def _to_share(
    skeleton: Skeleton, weights: Sequence[torch.Tensor], checkpoint: StrPath | None
) -> Mapping[int, torch.Tensor]:
    return {
        n: t
        for n, t in enumerate(weights)
        if not t.is_meta and (checkpoint is None or not skeleton.weights[n].is_parameter)
    }
