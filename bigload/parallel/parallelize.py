"""Run a model in several processes, each of which has a part of every layer: parallelformers' `parallelize`."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import nn

from bigload.conversion.checkpoint_view import CheckpointView, view_for
from bigload.errors import OptionError, ParallelError, StateDictMismatchError
from bigload.loading.settings import Method, settings
from bigload.machine.memory.process_memory import trim_heap
from bigload.machine.threads.thread_pool import usable_cores
from bigload.parallel.model_from_folder import model_from_folder
from bigload.parallel.shard_model import ShardModel
from bigload.parallel.sharded_loading.stored_tensors import open_stored
from bigload.parallel.tensor_parallel.apply import plan_tensor_parallel
from bigload.parallel.tensor_parallel.plan import TensorParallelPlan
from bigload.parallel.workers.model_skeleton import Skeleton, make_skeleton
from bigload.parallel.workers.parallel_model import ParallelModel, ParallelReport
from bigload.parallel.workers.startup import start_workers
from bigload.planning.tensor_parallel.division import MAX_RANKS
from bigload.units import format_size

StrPath = str | os.PathLike[str]

P = ParamSpec("P")

_BACKENDS = ("nccl", "gloo")
_METHODS = ("forward", "generate")
_VERBOSE = (None, "none", "simple", "detail")
_SECONDS = "more than 0 seconds, or None"
_log = logging.getLogger("bigload.parallel")


def _in_either_order(function: Callable[P, ParallelModel]) -> Callable[P, ParallelModel]:
    """Take `(model, fp16, num_gpus, ...)` too, as parallelformers does: a bool in the second place is `fp16`."""

    @wraps(function)
    def reordered(*args: P.args, **kwargs: P.kwargs) -> ParallelModel:
        given: list[Any] = list(args)
        if len(given) > 1 and isinstance(given[1], bool):
            fp16 = given.pop(1)
            if len(given) > 1:
                given.insert(2, fp16)
            else:  # num_gpus is given by name
                kwargs["fp16"] = fp16
        return function(*given, **kwargs)

    return reordered


@_in_either_order
def parallelize(
    model: nn.Module | StrPath,
    num_gpus: int,
    fp16: bool = False,
    custom_policies: object = None,
    master_addr: str = "127.0.0.1",  # noqa: ARG001 - see below
    master_port: int | None = None,
    backend: str = "nccl",
    verbose: str | None = None,
    init_method: str = "spawn",
    daemon: bool = True,
    seed: int | None = None,
    *,
    checkpoint: StrPath | None = None,
    method: Method | str | None = None,
    example: Mapping[str, object] | None = None,
    methods: Sequence[str] | None = None,
    timeout: float | None = None,
    start_timeout: float = 600.0,
) -> ParallelModel:
    """Divide `model` among workers, processes on this host, in which its methods run until `deparallelize`.

    Every call goes to all workers, which compute it together, and the answer of the first comes back on the CPU. Random
    numbers are drawn as if the model ran here: sampling with one seed gives the same tokens. Calls of several threads
    take turns. It is for inference: workers run the model in evaluation mode and without gradients. Caches of keys and
    values stay in the workers; what is returned for one stands for it, and can be given to the next call.

    Workers have the model as it is now. What is changed in it later counts for nothing there: weights, their dtype,
    hooks inside of it, its training mode. But a call takes along whether `torch.autocast` is on, and of models of
    transformers `generation_config`, how attention is computed, and `use_cache`, `output_attentions`,
    `output_hidden_states` and `return_dict` of the config.

    Arguments up to `seed` are those of parallelformers, also in its order `(model, fp16, num_gpus, ...)`. As there, the
    model's `to`, `cpu` and `cuda` end the workers first. Without a checkpoint the weights of the model move, once,
    into memory that workers share with this process; the model keeps them, and whoever writes to one gets a copy of
    that page. A model that a checkpoint fills is not filled here: each worker reads its part.

    No script needs a guard for `__name__`, for workers do not run it again. So classes of the model have to come from
    files that can be imported. Workers end when this process does, however that happens.

    Args:
        model: With weights; on the meta device, with a `checkpoint`; or a folder that `reshard` wrote in the layout
            `ranks`, or another checkpoint, whose `config.json` names a class of transformers.
        num_gpus: How many workers: one for each accelerator, from the first on, or processes on the CPU.
        fp16: Whether parameters, and buffers that are stored, become float16 in the workers; the model here stays.
        custom_policies: How to divide the model, instead of what is found for it: words by patterns of names, as
            `plan_tensor_parallel` takes them.
        master_addr: Taken for programs that give it. Workers are on this host, and meet in memory that only they have.
        master_port: As `master_addr`: no port is opened.
        backend: `nccl` for accelerators of CUDA, `gloo` for the CPU.
        verbose: `simple` logs what each worker holds, `detail` also how each parameter is divided, at the level INFO of
            the logger `bigload.parallel`. `None` or `none` logs nothing.
        init_method: `spawn`, and nothing else: workers are fresh interpreters.
        daemon: Whether the end of this interpreter ends the workers at once, or asks them to stop first.
        seed: What torch's generators are seeded with here, after whose state workers draw.
        checkpoint: Where the weights are: a file or folder that `open_checkpoint` takes, or a folder of ranks.
        method: How workers read the checkpoint, as for `bigload.load`.
        example: Arguments of a forward by name, to plan by; models of transformers need none.
        methods: Names of methods to run in workers; by default `forward`, which is what calling the model does, and
            `generate` if there is one.
        timeout: Seconds that a call may take; by default as long as it does.
        start_timeout: Seconds until all workers have to be ready.

    Raises:
        ParallelError: a process that multiprocessing spawned got here by importing a script without a guard.
        OptionError: an argument cannot be, here or with the others; nothing was started.
        PartitionError: the model does not divide among so many as `custom_policies` ask.
        ModelNotSendableError: workers could not make the model again: of classes in the script itself, for one.
        CheckpointError, LoadError: the checkpoint is not there, not sound, or not of this model.
        WorkerError, WorkerTimeoutError: a worker failed while it started, and all have been ended.
            Calls of the model raise them as well.
    """
    began = time.perf_counter()
    _check_not_imported_again()
    _check_options(num_gpus, backend, verbose=verbose, init_method=init_method, port=master_port)
    settings(None, method, None)  # raises if there is no such method
    _require("timeout", timeout, _is_limit(timeout), _SECONDS)
    _require("start_timeout", start_timeout, _is_limit(start_timeout), _SECONDS)
    _require("model", model, isinstance(model, nn.Module | str | os.PathLike), "a torch.nn.Module, or a folder's path")
    _require("example", example, _has_names(example), "arguments of a forward by name")
    if not isinstance(model, nn.Module):
        checkpoint = model if checkpoint is None else checkpoint
        model = model_from_folder(Path(model))
    is_parallel = isinstance(getattr(vars(model).get("deparallelize"), "__self__", None), ParallelModel)
    _require(
        "model",
        type(model).__name__,
        not is_parallel,
        "one that has no workers",
        hint="call model.deparallelize() before",
    )
    called = _methods(model, methods)
    _warn_of_too_many(num_gpus, backend)
    with torch.inference_mode(mode=False), torch.enable_grad():  # the plan is found by what flows back
        plan = plan_tensor_parallel(model, num_gpus, custom_policies=custom_policies, example=example)
    trim_heap(collect_garbage=True)
    skeleton, weights = make_skeleton(model)
    source = None if checkpoint is None else Path(checkpoint).absolute()
    shared = _shared_weights(skeleton, weights, source)
    stored = None if source is None else view_for(model, open_stored(source))
    if stored is not None:
        _check_has_all(skeleton, stored, type(model).__name__)
    del weights
    if seed is not None:
        torch.manual_seed(seed)
    pool, workers = start_workers(
        skeleton,
        shared,
        ShardModel(plan=plan, stored=stored, method=method, dtype=torch.float16 if fp16 else None),
        num_workers=num_gpus,
        backend=backend,
        daemon=daemon,
        timeout_seconds=start_timeout,
    )
    report = ParallelReport(workers=workers, notes=plan.notes, seconds=time.perf_counter() - began)
    _tell(report, plan, verbose)
    return ParallelModel(model, pool, report, methods=called, timeout=timeout)


def _check_options(num_gpus: int, backend: str, *, verbose: str | None, init_method: str, port: int | None) -> None:
    """Raise `OptionError` if an argument cannot be."""
    _require("num_gpus", num_gpus, type(num_gpus) is int and 1 <= num_gpus <= MAX_RANKS, f"1 to {MAX_RANKS}")
    _require("backend", backend, backend in _BACKENDS, " or ".join(_BACKENDS))
    _require("verbose", verbose, verbose in _VERBOSE, "none, simple or detail")
    hint = "workers are fresh interpreters, which forks are not"
    _require("init_method", init_method, init_method == "spawn", "spawn", hint=hint)
    is_port = port is None or (isinstance(port, int) and 1 <= port <= 65535)
    _require("master_port", port, is_port, "1 to 65535, or None")
    limit = torch.cuda.device_count() if backend == "nccl" else num_gpus
    expected = f"at most {limit} for the backend nccl: one accelerator of CUDA for each worker"
    _require("num_gpus", num_gpus, num_gpus <= limit, expected, hint='backend="gloo" runs the workers on the CPU')


def _require(name: str, value: object, is_valid: bool, expected: str, *, hint: str | None = None) -> None:
    if not is_valid:
        raise OptionError.of(name, value, expected, hint=hint)


def _is_limit(seconds: object) -> bool:
    return seconds is None or (isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds > 0)


def _has_names(example: object) -> bool:
    return example is None or (isinstance(example, Mapping) and all(isinstance(name, str) for name in example))


def _warn_of_too_many(num_workers: int, backend: str) -> None:
    num_cores = usable_cores()
    if backend == "gloo" and num_workers > num_cores:
        _log.warning(
            "%d workers take turns on %d cores: more than one for each core makes starts and calls slower",
            num_workers,
            num_cores,
        )


def _check_not_imported_again() -> None:
    """Raise in a process that multiprocessing has spawned for something else, and that imports the script meanwhile."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ParallelError(
            "parallelize was reached while a process of multiprocessing imports the script again, to do other work",
            hint='put what the script does below: if __name__ == "__main__":  '
            "(workers of bigload do not need it, but those of multiprocessing do)",
        )


def _methods(model: nn.Module, asked: Sequence[str] | None) -> list[str]:
    """Return the names of methods to run in workers."""
    for name in asked or ():
        if not callable(getattr(model, name, None)):
            raise OptionError.of("methods", name, f"a method of {type(model).__name__}")
    return list(asked) if asked is not None else [name for name in _METHODS if callable(getattr(model, name, None))]


def _shared_weights(
    skeleton: Skeleton, weights: Sequence[torch.Tensor], checkpoint: Path | None
) -> dict[int, torch.Tensor]:
    """Return what workers get from this process: all weights, or beside a checkpoint the buffers that have values."""
    if checkpoint is None:
        expected, hint = "a checkpoint with the values", "give checkpoint=FOLDER"
    else:
        expected = "values of buffers that no checkpoint has"
        hint = "make the model under bigload.init_empty_weights(), which leaves buffers their values"
    forms = skeleton.weights
    empty = [
        form.names[0]
        for form, tensor in zip(forms, weights, strict=True)
        if tensor.is_meta and (checkpoint is None or not form.is_stored)
    ]
    if empty:
        more = f", and {len(empty) - 1} more are" if len(empty) > 1 else ""
        raise OptionError.of("checkpoint", checkpoint, f"{expected}: {empty[0]} is on the meta device{more}", hint=hint)
    return {
        number: tensor
        for number, tensor in enumerate(weights)
        if not tensor.is_meta and (checkpoint is None or not forms[number].is_parameter)
    }


def _check_has_all(skeleton: Skeleton, view: CheckpointView, model: str) -> None:
    """Raise if a parameter is not in `view` or cannot be made, before any process is started."""
    stored = view.tensors
    parameters = [form for form in skeleton.weights if form.is_parameter]
    missing = [form.names[0] for form in parameters if not any(name in stored for name in form.names)]
    misshapen = [
        f"{name} has shape {list(stored[name].torch_shape)}, expected {list(form.shape)}"
        for form in parameters
        for name in form.names
        if name in stored and stored[name].torch_shape != form.shape
    ]
    if missing or misshapen or view.problems:
        raise StateDictMismatchError(
            model,
            missing=missing,
            unexpected=(),
            misshapen=misshapen,
            problems=view.problems,
            hint="check that the checkpoint is one of this model; nothing was started",
        )


def _tell(report: ParallelReport, plan: TensorParallelPlan, verbose: str | None) -> None:
    if verbose in (None, "none"):
        return
    for worker in report.workers:
        held, read = format_size(worker.weight_bytes), format_size(worker.read_bytes)
        _log.info("worker %d, process %d: %s of weights, %s read", worker.rank, worker.process_id, held, read)
    for note in report.notes:
        _log.info("%s", note.text)
    if verbose == "detail":
        for name, division in plan.divisions.items():
            _log.info("%s: %s", name, "whole" if division.dim is None else f"{division.ranges} of {division.dim}")
