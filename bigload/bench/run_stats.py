"""Forwards of a dispatched model of transformers, timed, with the statistics of its weight streaming."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from bigload.bench.run_model import PlannedModel, stats_of, synchronize
from bigload.bench.runner import OnRun
from bigload.bench.steps import Steps
from bigload.checkpoint.model import Checkpoint
from bigload.planning.plan import Plan
from bigload.runtime.streaming.run_log import RunStats

DEFAULT_FORWARDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatsReport:
    """Times and streaming statistics of forwards.

    Attributes:
        path: The checkpoint path as given.
        model_class: The class in transformers.
        total_bytes: Bytes of all tensors.
        disk_bytes: Bytes of the tensors that the plan leaves on disk.
        num_threads: Threads that torch computes with.
        device: The device that runs streamed modules.
        tokens: Length of each input.
        load_seconds: Time from the empty model to the dispatched one.
        seconds: Time of each forward, measured by the caller.
        stats: Statistics of weight streaming; `None` where the plan streams nothing.
    """

    path: str
    model_class: str
    total_bytes: int
    disk_bytes: int
    num_threads: int
    device: str
    tokens: int
    load_seconds: float
    seconds: tuple[float, ...]
    stats: RunStats | None

    @property
    def median_seconds(self) -> float:
        """Return the median time of a forward."""
        return statistics.median(self.seconds)


def run_forwards(
    checkpoint: Checkpoint | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    forwards: int = DEFAULT_FORWARDS,
    tokens: int = 1,
    prefetch_bytes: int | None = None,
    resident_bytes: int | None = None,
    on_run: OnRun = lambda _words: None,
) -> RunStatsReport:
    """Dispatch the model in `checkpoint` by `plan`, run it, and return times and streaming statistics.

    Args:
        checkpoint: The folder of a model of transformers: weights and `config.json`.
        plan: A plan made for this checkpoint; everything on disk when left out.
        forwards: The number of forwards.
        tokens: Length of the input; its tokens are random, and the same in each forward.
        prefetch_bytes: See `dispatch_model`.
        resident_bytes: See `dispatch_model`.
        on_run: Called with a short text before each forward.

    Raises:
        ValueError: fewer than one forward or token.
        MissingPackageError: transformers is not installed.
        OptionError: transformers has no such model, or it does not take tokens.
        PlanError: the plan is for another checkpoint.
        StateDictMismatchError: the model has other tensors than the checkpoint.
        LoadError: the checkpoint cannot be loaded.
    """
    if min(forwards, tokens) < 1:
        raise ValueError(f"{forwards} forwards of {tokens} tokens; expected one or more")
    planned = PlannedModel.open(
        checkpoint, plan, asked_by="run-stats", prefetch_bytes=prefetch_bytes, resident_bytes=resident_bytes
    )
    num_bytes = planned.checkpoint.stored_bytes
    steps = Steps(on_run, total_bytes=num_bytes * (1 + forwards), step_bytes=num_bytes)
    steps.begin("loading")
    began = time.perf_counter()
    model = planned.dispatched()
    load_seconds = time.perf_counter() - began
    inputs = planned.inputs(tokens)
    seconds = []
    for number in range(forwards):
        steps.begin(f"forward {number + 1} of {forwards}")
        began = time.perf_counter()
        with torch.no_grad():
            model(**inputs)
        synchronize(planned.device)
        seconds.append(time.perf_counter() - began)
    return RunStatsReport(
        path=planned.checkpoint.path,
        model_class=planned.maker.model_class.__name__,
        total_bytes=planned.checkpoint.total_bytes,
        disk_bytes=sum(planned.checkpoint.tensors[name].num_bytes for name in planned.on_disk),
        num_threads=torch.get_num_threads(),
        device=str(planned.device),
        tokens=tokens,
        load_seconds=load_seconds,
        seconds=tuple(seconds),
        stats=stats_of(model),
    )
