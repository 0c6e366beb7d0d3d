"""Benchmark of cases of one checkpoint beside each other, raw reads and other loaders.

1. Each case loads once, untimed; digests prove that all load the same bytes.
2. Cases, raw reads of the same bytes and peers run in rotating order.
3. A traced load of each case shows where the time goes.
4. Loads of parts of the checkpoint show the size from which several threads pay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bigload.bench.cases import LoadCase, all_cases
from bigload.bench.fresh_memory import renew
from bigload.bench.loaded_memory import MemoryKind, digest_of, finish
from bigload.bench.page_cache_state import CacheState, prepare
from bigload.bench.raw_limit import RawKind, RawRead, can_read_direct, kind_for, raw_read, raw_reads
from bigload.bench.results.bench_warnings import warnings_for
from bigload.bench.results.recommendation import Recommendation, SizeMeasured, best_of, measure_sizes
from bigload.bench.results.report import BenchReport, PeerResult, RawResult, StrategyResult, phase_shares
from bigload.bench.runner import Clock, Contender, OnRun, Outcome, run_rounds
from bigload.bench.steps import Steps
from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import OptionError
from bigload.extras import require
from bigload.loading.settings import Method
from bigload.machine.threads.thread_pool import usable_cores

if TYPE_CHECKING:
    from bigload.bench.peers import Load
    from bigload.loading.load import LoadedTensors
    from bigload.loading.report import LoadReport

DEFAULT_RUNS = 5
_LONGEST_PROBLEM = 200


def bench_load(
    checkpoint: Checkpoint | str | Path,
    *,
    threads: Sequence[int] = (1, 2, 4),
    methods: Sequence[Method | str] = (Method.AUTO,),
    runs: int = DEFAULT_RUNS,
    cold: bool = False,
    warm: bool = False,
    device: str = "cpu",
    dtype: str | None = None,
    max_inflight: int | None = None,
    peers: bool = False,
    raw: bool = True,
    trace: bool = True,
    sizes: bool = True,
    on_run: OnRun = lambda _words: None,
    clock: Clock = time.perf_counter,
) -> BenchReport:
    """Load `checkpoint` `runs` times with every one of `methods` and every one of the thread counts in `threads`.

    A run ends when every byte can be used. Where tensors stay pages of a file, one byte of every page is read before
    the clock stops, for bigload and for others alike. The memory is given back between runs.

    Args:
        checkpoint: What `open_checkpoint` takes, or what it returned.
        threads: Thread counts; 1 is serial.
        methods: How the bytes are read.
        runs: Timed runs of each.
        cold: Drop the files from the page cache before every run, and look whether they are gone.
        warm: Read the files before every run that finds them out of the page cache.
        device: Where the tensors go: `cpu` or `cuda:0`.
        dtype: What floating-point tensors are converted to; as stored when left out.
        max_inflight: Bytes that may be read or staged at one moment.
        peers: Time the other loaders that are installed, too.
        raw: Time raw reads of the same bytes by turns with the loads: the limit of this machine.
        trace: Load once more with each strategy, to see where the time goes.
        sizes: Load parts of the checkpoint, to see from which size on threads pay.
        on_run: Called with a few words before each run, and how much is left where that takes long.
        clock: Seconds that only go forward.

    Raises:
        ValueError: no strategy or no run was asked for.
        OptionError: options that exclude each other, or that do not apply to a remote checkpoint.
        MissingPackageError: torch is not installed.
        LoadError: a strategy cannot load the checkpoint; above all NotEnoughMemoryError, before anything is timed.
    """
    require("torch", asked_by="bench-load", extra="torch")
    cases = all_cases(threads, [Method(m) for m in methods], device=device, dtype=dtype, max_inflight=max_inflight)
    if runs < 1:
        raise ValueError(f"{runs} runs; expected at least one")
    cache = _cache_state(cold=cold, warm=warm)
    if peers and dtype is not None:
        raise OptionError("peers are compared as the checkpoint is stored", hint="leave out --dtype or --peers")
    opened = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    is_remote = not scheme_of(opened.root).is_local
    if is_remote and (cold or warm or peers):
        raise OptionError(
            f"{opened.path} is read over the network: no page cache and no other loader has a part in that",
            hint="leave out --cold, --warm and --peers; or fetch it first: bigload fetch",
        )
    steps = Steps(
        on_run,
        total_bytes=opened.stored_bytes * len(cases) * (1 + runs + trace),
        step_bytes=opened.stored_bytes,
    )
    bench = _LoadBench(opened, cache, steps, clock)
    busy = load_average()
    digests = {case: bench.check(case) for case in cases}
    with ExitStack() as made:
        ready, absent = bench.ready_peers(device, digests[cases[0]], made) if peers else ((), ())
        reads = bench.raw_reads(cases, [peer for peer, _ in ready]) if raw and not is_remote else ()
        steps.total_bytes += opened.stored_bytes * (len(reads) * runs + len(ready) * (1 + runs))
        outcome = run_rounds(
            [
                *(Contender(name=case.name, run=bench.loading(case)) for case in cases),
                *(Contender(name=read.name, run=partial(raw_read, read, opened)) for read in reads),
                *(Contender(name=peer.name, run=load, may_fail=True) for peer, load in ready),
            ],
            runs=runs,
            files=bench.files,
            cache=cache,
            renewed_bytes=max(opened.total_bytes, *(bench.tensor_bytes(case) for case in cases)),
            on_run=steps.begin,
            clock=clock,
        )
    raw_results = tuple(RawResult(read=read, measured=outcome.measured[read.name]) for read in reads)
    results = tuple(bench.result(*item, outcome, raw_results, trace=trace) for item in digests.items())
    peer_results = (*(bench.peer_result(peer, outcome, raw_results) for peer, _ in ready), *absent)
    cached = [measured.cached for measured in outcome.measured.values()]
    report = BenchReport(
        path=opened.path,
        total_bytes=opened.stored_bytes,
        num_shards=len(opened.shards),
        num_cores=bench.num_cores,
        runs=runs,
        device=device,
        dtype=dtype,
        cache=cache,
        is_remote=is_remote,
        cached=(min(least for least, _ in cached), max(largest for _, largest in cached)),
        left_in_cache=outcome.left_in_cache,
        load_average=busy,
        results=results,
        raw=raw_results,
        peers=peer_results,
    )
    return replace(report, recommendation=bench.recommend(results, sizes=sizes), warnings=warnings_for(report))


class _LoadBench:
    """Steps of one bench and their shared state."""

    def __init__(self, checkpoint: Checkpoint, cache: CacheState, steps: Steps, clock: Clock) -> None:
        self.checkpoint = checkpoint
        is_local = scheme_of(checkpoint.root).is_local
        self.files = [checkpoint.root / shard.file for shard in checkpoint.shards] if is_local else []
        self.num_cores = usable_cores()
        self._cache = cache
        self._on_run = steps.begin
        self._clock = clock
        self._reports: dict[str, LoadReport] = {}

    def check(self, case: LoadCase) -> str:
        self._on_run(f"{case.name}: checking")
        prepare(self.files, self._cache)
        return digest_of(self.loading(case)())

    def loading(self, case: LoadCase) -> Callable[[], LoadedTensors]:
        """Return a function that loads everything to the last byte and keeps the report of the load."""

        def run() -> LoadedTensors:
            tensors = case.load(self.checkpoint)
            finish(tensors.values(), case.memory)
            self._reports[case.name] = tensors.report
            return tensors

        return run

    def tensor_bytes(self, case: LoadCase) -> int:
        """Return the bytes of what `case` loads; it was loaded once already."""
        return self._reports[case.name].tensor_bytes

    def raw_reads(self, cases: Iterable[LoadCase], peers: Iterable[PeerResult]) -> tuple[RawRead, ...]:
        """Return the raw reads that are a limit for one of the contenders."""
        kinds = [self._limit_kind(case.memory, self._method(case)) for case in cases]
        kinds += [self._limit_kind(peer.memory, Method.READ) for peer in peers if not self._is_on_device(cases)]
        return raw_reads([kind for kind in kinds if kind is not None], num_cores=self.num_cores)

    def ready_peers(
        self, device: str, sha256: str, made: ExitStack
    ) -> tuple[Sequence[tuple[PeerResult, Load]], Sequence[PeerResult]]:
        """Return the peers that load the checkpoint, checked against `sha256`, and why the others do not."""
        from bigload.bench.peers import PEERS, CannotLoadError, PeerTarget

        target = PeerTarget(self.checkpoint, device, made)
        ready: list[tuple[PeerResult, Load]] = []
        absent: list[PeerResult] = []
        for peer in PEERS:
            memory = peer.memory if device == "cpu" else MemoryKind.DEVICE
            result = PeerResult(name=peer.name, package=peer.package, version=peer.version, memory=memory)
            problem = "not installed"
            if result.version is not None:
                self._on_run(f"{peer.name}: checking")
                try:
                    load = peer.ready(target)
                    ready.append((replace(result, is_identical=digest_of(load()) == sha256), load))
                    continue
                except CannotLoadError as error:
                    problem = str(error)
                except Exception as error:
                    problem = short_problem(error)
            absent.append(replace(result, problem=problem))
        return ready, absent

    def result(
        self, case: LoadCase, sha256: str, outcome: Outcome, raw: Sequence[RawResult], *, trace: bool
    ) -> StrategyResult:
        """Return a strategy's result; load once more for the trace if that is wanted."""
        report = self._reports[case.name]
        result = StrategyResult(
            case=case,
            method=report.method,
            reason=report.reason,
            memory=case.memory,
            measured=outcome.measured[case.name],
            sha256=sha256,
            limit=self._limit(case.memory, report.method, raw),
        )
        if not trace:
            return result
        self._on_run(f"{case.name}: tracing")
        prepare(self.files, self._cache)
        traced = case.load(self.checkpoint, trace=True).report
        return replace(result, phases=phase_shares(traced), activities=traced.activities)

    def peer_result(self, peer: PeerResult, outcome: Outcome, raw: Sequence[RawResult]) -> PeerResult:
        """Return a peer's result with its measurements, or the error that it ended with."""
        failure = outcome.failures.get(peer.name)
        return replace(
            peer,
            measured=outcome.measured.get(peer.name),
            limit=self._limit(peer.memory, Method.READ, raw),
            problem=None if failure is None else short_problem(failure),
        )

    def recommend(self, results: Sequence[StrategyResult], *, sizes: bool) -> Recommendation:
        """Return the strategy to use; with `sizes`, try from which size on its threads pay."""
        best = best_of([(result.case, result.summary) for result in results])
        advice = Recommendation(strategy=best.name, threads=best.threads, method=str(self._reports[best.name].method))
        if best.threads == 1 or not sizes:
            return advice
        found = measure_sizes(self.checkpoint, best, self._time_part)
        serial = next((r for r in results if r.case == replace(best, threads=1)), None)
        if serial is not None:  # the whole was measured before
            parallel = next(result for result in results if result.case == best)
            found = (*found, SizeMeasured.of(self.checkpoint.stored_bytes, serial.seconds, parallel.seconds))
        return replace(advice, sizes=found)

    def _time_part(self, case: LoadCase, names: Sequence[str]) -> float:
        self._on_run(f"{case.name}: a part of {len(names)} tensors")
        prepare(self.files, self._cache)
        renew(sum(self.checkpoint.tensors[name].num_bytes for name in names))
        began = self._clock()
        tensors = case.load(self.checkpoint, only=names)
        finish(tensors.values(), case.memory)
        return self._clock() - began

    def _method(self, case: LoadCase) -> Method:
        return self._reports[case.name].method

    def _limit_kind(self, memory: MemoryKind, method: Method) -> RawKind | None:
        is_from_disk = (self._cache is CacheState.COLD or method is Method.DIRECT) and can_read_direct(self.files)
        if memory is MemoryKind.DEVICE and not is_from_disk:
            return None  # there is no raw copy to a device to compare with
        return kind_for(memory, is_from_disk=is_from_disk)

    def _limit(self, memory: MemoryKind, method: Method, raw: Sequence[RawResult]) -> str | None:
        kind = self._limit_kind(memory, method)
        ways = [result for result in raw if result.read.kind is kind]
        return min(ways, key=lambda result: result.measured.median_seconds).name if ways else None

    @staticmethod
    def _is_on_device(cases: Iterable[LoadCase]) -> bool:
        return any(case.memory is MemoryKind.DEVICE for case in cases)


def _cache_state(*, cold: bool, warm: bool) -> CacheState:
    if cold and warm:
        raise OptionError("the page cache cannot be cold and warm", hint="choose one of --cold and --warm")
    return CacheState.COLD if cold else CacheState.WARM if warm else CacheState.AS_IS


def short_problem(error: BaseException) -> str:
    """Return the first line of an error, shortened."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return text if len(text) <= _LONGEST_PROBLEM else f"{text[: _LONGEST_PROBLEM - 1]}…"


def load_average() -> float | None:
    """Return the load average of the last minute; `None` where the system does not report it."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
