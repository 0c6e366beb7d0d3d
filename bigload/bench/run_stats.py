"""Run a model of transformers a few times under a plan, and return what its streaming did."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from bigload.bench.bench_run import target_of
from bigload.bench.run_contenders import ours
from bigload.bench.run_model import Work
from bigload.bench.run_turns import stats_of
from bigload.bench.runner import OnRun
from bigload.bench.steps import Steps
from bigload.checkpoint.model import Checkpoint
from bigload.planning.plan import Plan
from bigload.runtime.streaming.run_log import RunStats

DEFAULT_FORWARDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatsReport:
    """What was run, and what it took.

    Attributes:
        path: The model as it was named.
        model_class: Its class in transformers.
        total_bytes: Bytes of all its tensors.
        disk_bytes: Those that the plan has on the disk.
        num_threads: Threads that torch computes with.
        device: Where it runs.
        tokens: Length of what it was given each time.
        load_seconds: From the empty model to the one that can run.
        seconds: Of every forward, measured from outside.
        stats: What streaming did in them; `None` where the plan leaves nothing to bring in.
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
    """Load and dispatch the model in `checkpoint` as `plan` says, run it, and return what was seen.

    Args:
        checkpoint: The folder of a model of transformers: weights and `config.json`.
        plan: Where its parts go, a plan made for this checkpoint; everything on the disk when left out.
        forwards: How often it runs.
        tokens: Length of what the model is given; the tokens are random, and the same each time.
        prefetch_bytes: See `dispatch_model`.
        resident_bytes: See there.
        on_run: Called with a few words before each forward.

    Raises:
        ValueError: no forward or no token was asked for.
        BigloadError: see `bench_run`.
    """
    if min(forwards, tokens) < 1:
        raise ValueError(f"{forwards} forwards of {tokens} tokens; expected one or more")
    with ExitStack() as opened:
        target = target_of(
            checkpoint,
            plan,
            asked_by="run-stats",
            keeps_cache=False,
            prefetch_bytes=prefetch_bytes,
            resident_bytes=resident_bytes,
            opened=opened,
        )
        num_bytes = target.checkpoint.stored_bytes
        steps = Steps(on_run, total_bytes=num_bytes * (1 + forwards), step_bytes=num_bytes)
        steps.begin("loading")
        began = time.perf_counter()
        model = ours(target).make()
        load_seconds = time.perf_counter() - began
        work = Work(tokens=tokens)
        inputs = work.inputs(target.maker, target.device)
        seconds = []
        for number in range(forwards):
            steps.begin(f"forward {number + 1} of {forwards}")
            began = time.perf_counter()
            work.run(model, inputs)
            seconds.append(time.perf_counter() - began)
        return RunStatsReport(
            path=target.checkpoint.path,
            model_class=target.maker.model_class.__name__,
            total_bytes=target.checkpoint.total_bytes,
            disk_bytes=sum(target.checkpoint.tensors[name].num_bytes for name in target.on_disk),
            num_threads=torch.get_num_threads(),
            device=str(target.device),
            tokens=tokens,
            load_seconds=load_seconds,
            seconds=tuple(seconds),
            stats=stats_of(model),
        )
