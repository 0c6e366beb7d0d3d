"""Time a model of transformers whose weights are on disk, against the same model in memory and against other runtimes.

Everyone runs first, untimed: that proves that they compute the same. Then all take turns, with raw reads of the same
bytes among them: no run is faster than the longer of computing and reading.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from bigload.bench.answers import compare_answers
from bigload.bench.bench_load import load_average, short_problem
from bigload.bench.bench_warnings import BenchWarning, Conditions, warnings_for
from bigload.bench.page_cache_state import CacheState
from bigload.bench.raw_limit import RawKind, RawRead, can_read_direct, raw_read, raw_reads
from bigload.bench.run_contenders import BIGLOAD, CONTENDERS, CannotRunError, Prepared, RunContender, RunTarget
from bigload.bench.run_model import ModelMaker, Work
from bigload.bench.run_report import ReadResult, RunReport, RunResult
from bigload.bench.run_turns import FirstRun, Racer, Run, Turns, first_run, take_turns
from bigload.bench.runner import Clock, OnRun
from bigload.bench.steps import Steps
from bigload.checkpoint.model import Checkpoint
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned, read_plan

DEFAULT_ROUNDS = 5


def bench_run(
    checkpoint: Checkpoint | str | Path,
    plan: Plan | str | Path | None = None,
    *,
    tokens: int = 1,
    new_tokens: int = 0,
    rounds: int = DEFAULT_ROUNDS,
    cold: bool = False,
    prefetch_bytes: int | None = None,
    resident_bytes: int | None = None,
    peers: bool = True,
    on_run: OnRun = lambda _words: None,
    clock: Clock = time.perf_counter,
) -> RunReport:
    """Run the model in `checkpoint` as `plan` says, and time it by turns with everyone else who can run it.

    Args:
        checkpoint: The folder of a model of transformers: weights and `config.json`.
        plan: Where its parts go, a plan made for this checkpoint; everything on the disk when left out.
        tokens: Length of what the model is given; the tokens are random, and the same each time.
        new_tokens: Decode as many after it, with the KV cache, greedily. A run is then all of that, else one forward.
        rounds: Turns of each. A turn is one run from a cold page cache, else three.
        cold: Drop all files from the page cache before every run, and look whether they are gone.
        prefetch_bytes: For bigload: see `dispatch_model`.
        resident_bytes: See there. With `cold`, models are new in every run: then nothing is resident when it begins.
        peers: Time accelerate and transformers too, where they are installed.
        on_run: Called with a few words before each turn, and how much is left where that takes long.
        clock: Seconds that only go forward.

    Raises:
        ValueError: no token or no round was asked for.
        MissingPackageError: transformers is not installed.
        BenchOptionError: transformers knows no such model, or it does not take tokens.
        PlanError: the plan is for another checkpoint.
        StateDictMismatchError: the model has other tensors than the checkpoint.
        LoadError: the checkpoint cannot be loaded.
    """
    if min(tokens, rounds) < 1 or new_tokens < 0:
        raise ValueError(f"{tokens} tokens, {new_tokens} new ones, {rounds} rounds; expected one or more")
    with ExitStack() as opened:
        target = target_of(
            checkpoint,
            plan,
            asked_by="bench-run",
            keeps_cache=new_tokens > 1,
            prefetch_bytes=prefetch_bytes,
            resident_bytes=resident_bytes,
            opened=opened,
        )
        work = Work(tokens=tokens, new_tokens=new_tokens)
        inputs = work.inputs(target.maker, target.device)
        bench = _Bench(target, partial(work.run, inputs=inputs), on_run, clock)
        return bench.report(work, rounds=rounds, cache=CacheState.COLD if cold else CacheState.WARM, peers=peers)


def target_of(
    checkpoint: Checkpoint | str | Path,
    plan: Plan | str | Path | None,
    *,
    asked_by: str,
    keeps_cache: bool,
    prefetch_bytes: int | None,
    resident_bytes: int | None,
    opened: ExitStack,
) -> RunTarget:
    """Return the model to run; errors are those of `bench_run`, and name `asked_by`."""
    planned = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    found = open_planned(planned, checkpoint, source=str(plan) if isinstance(plan, str | Path) else "the plan")
    return RunTarget(
        checkpoint=found,
        plan=None if planned is None else replace(planned, checkpoint_path=str(found.root)),
        maker=ModelMaker.of(found, asked_by=asked_by),
        keeps_cache=keeps_cache,
        prefetch_bytes=prefetch_bytes,
        resident_bytes=resident_bytes,
        opened=opened,
    )


@dataclass(frozen=True, slots=True)
class _Ready:
    prepared: Prepared
    first: FirstRun


class _Bench:
    """What all steps of one bench share, and the steps."""

    def __init__(self, target: RunTarget, run: Run, on_run: OnRun, clock: Clock) -> None:
        self.target = target
        self._run = run
        num_bytes = target.checkpoint.stored_bytes
        self._steps = Steps(on_run, total_bytes=num_bytes * len(CONTENDERS), step_bytes=num_bytes)
        self._clock = clock
        names = set(target.on_disk)
        tensors = {name: tensor for name, tensor in target.checkpoint.tensors.items() if name in names}
        self._stored = replace(target.checkpoint, tensors=tensors)
        """What the plan has on the disk."""

    def report(self, work: Work, *, rounds: int, cache: CacheState, peers: bool) -> RunReport:
        """Measure, and return what was found."""
        busy = load_average()
        ready, absent = self._ready(peers=peers)
        files = tuple(dict.fromkeys(file for each in ready.values() for file in each.prepared.files))
        reads = self._raw_reads(cache)
        num_steps = len(ready) + (len(ready) + len(reads)) * rounds
        self._steps.total_bytes = self.target.checkpoint.stored_bytes * num_steps
        seen, left = take_turns(
            [
                *(Racer(name=one.name, prepared=each.prepared, may_fail=True) for one, each in ready.items()),
                *(Racer(name=read.name, read=partial(raw_read, read, self._stored)) for read in reads),
            ],
            self._run,
            rounds=rounds,
            forwards_per_run=work.num_forwards,
            files=files,
            cache=cache,
            on_run=self._steps.begin,
            clock=self._clock,
        )
        own = seen[BIGLOAD]
        if own.failure is not None:
            raise own.failure
        cached = [part for turns in seen.values() for part in turns.cached]
        forwards = () if own.stats is None else own.stats.forwards[-own.timed_forwards :]
        brought = [forward.bytes_from_ram + (forward.bytes_from_disk or 0) for forward in forwards]
        report = RunReport(
            path=self.target.checkpoint.path,
            model_class=self.target.maker.model_class.__name__,
            total_bytes=self.target.checkpoint.total_bytes,
            disk_bytes=self._stored.stored_bytes,
            streamed_bytes=int(statistics.fmean(brought) * work.num_forwards) if brought else None,
            num_threads=torch.get_num_threads(),
            device=str(self.target.device),
            dtype=str(self.target.cast or self.target.maker.dtype).removeprefix("torch."),
            tokens=work.tokens,
            new_tokens=work.new_tokens,
            rounds=rounds,
            cache=cache,
            cached=(min(cached, default=1.0), max(cached, default=1.0)),
            left_in_cache=left,
            load_average=busy,
            results=tuple(self._results(ready, absent, seen, peers=peers)),
            reads=tuple(ReadResult(read=read, seconds=tuple(seen[read.name].seconds)) for read in reads),
            stats=own.stats,
            timed_forwards=own.timed_forwards,
        )
        return replace(report, warnings=_warnings(report))

    def _ready(self, *, peers: bool) -> tuple[dict[RunContender, _Ready], dict[str, str]]:
        """Return those who can run, after a first run each, and why the others cannot."""
        ready: dict[RunContender, _Ready] = {}
        absent: dict[str, str] = {}
        for one in _asked(peers=peers):
            if one.package is not None and one.version is None:
                absent[one.name] = "not installed"
                continue
            self._steps.begin(f"{one.name}: first run")
            try:
                prepared = one.prepare(self.target)
                ready[one] = _Ready(prepared, first_run(prepared, self._run))
            except CannotRunError as error:
                absent[one.name] = str(error)
            except Exception as error:
                if one.package is None:  # ours
                    raise
                absent[one.name] = short_problem(error)
        return ready, absent

    def _results(
        self, ready: Mapping[RunContender, _Ready], absent: Mapping[str, str], seen: Mapping[str, Turns], *, peers: bool
    ) -> Sequence[RunResult]:
        expected = next(iter(ready.values())).first.answer
        results = []
        for one in _asked(peers=peers):
            result = RunResult(name=one.name, package=one.package, version=one.version, problem=absent.get(one.name))
            if one in ready:
                first, turns = ready[one].first, seen[one.name]
                compared = compare_answers(first.answer, expected)
                result = replace(
                    result,
                    seconds=tuple(turns.seconds) if turns.failure is None else (),
                    is_identical=compared.is_identical,
                    is_within_rounding=compared.is_within_rounding,
                    max_difference=compared.max_difference,
                    private_bytes=first.private_bytes,
                    file_bytes=first.file_bytes,
                    problem=None if turns.failure is None else short_problem(turns.failure),
                )
            results.append(result)
        return results

    def _raw_reads(self, cache: CacheState) -> tuple[RawRead, ...]:
        if not self._stored.tensors:
            return ()
        is_from_disk = cache is CacheState.COLD and can_read_direct(self.target.files)
        return raw_reads([RawKind.DISK if is_from_disk else RawKind.MAP], num_cores=_num_cores())


def _asked(*, peers: bool) -> list[RunContender]:
    return [one for one in CONTENDERS if peers or one.package is None]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _warnings(report: RunReport) -> tuple[BenchWarning, ...]:
    conditions = Conditions(
        seconds={result.name: result.seconds for result in report.results if result.seconds},
        cache=report.cache,
        cached=report.cached,
        left_in_cache=report.left_in_cache,
        load_average=report.load_average,
        num_cores=_num_cores(),
        option="--rounds",
    )
    return (*_about_the_answers(report), *warnings_for(conditions))


def _about_the_answers(report: RunReport) -> tuple[BenchWarning, ...]:
    others = [result.name for result in report.results if result.is_within_rounding is False]
    first = next(result.name for result in report.results if result.is_identical is not None)
    if not others:
        return ()
    text = f"{' and '.join(others)} computed something else than {first}: their figures are of another result"
    return (BenchWarning("other-results", text),)
