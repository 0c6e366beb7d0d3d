"""Time a model whose weights are on disk, beside the same model in memory, accelerate, transformers and raw reads.

    python benchmarks/bench_run.py FOLDER [--plan plan.json] [--tokens 128] [--new-tokens 32] [--rounds 5] [--cold]
        [--prefetch-bytes 1GiB] [--resident-bytes 0] [--threads 2] [--no-peers] [--json FILE]

FOLDER is a model of transformers, which has to be installed; without --plan all weights stay on disk. Every runtime
first runs once, untimed, and its output is compared with the first one's. Then they take turns with raw reads of the
same bytes, one run at a time. Warm, the models stay, and the files were read from start to end before; cold, a turn
builds the model anew and evicts all files. No run can beat the bound: the longer of computing (the model in memory) and
reading the streamed bytes.

    python benchmarks/bench_run.py FOLDER --verb [--new-tokens 9] [--rounds 20]

times what `bigload run` adds: tokens of its answers beside those of a bare `generate` of the same dispatched model, by
turns, and three of its whole processes to one token beside those of a bare script of transformers, with the files in
the page cache. FOLDER needs a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigload.bench.page_cache_state import CacheState, evict_verified, warm
from bigload.bench.raw_limit import RawKind, can_read_direct, raw_read, raw_reads
from bigload.bench.runner import Contender, Measured, run_rounds
from bigload.generation.folder_tokenizer import FolderTokenizer
from bigload.generation.planned_model import PlannedModel, stats_of, synchronize
from bigload.generation.prompts import Prompt
from bigload.generation.text_generator import Sampling, TextGenerator
from bigload.runtime.streaming.run_log import ForwardStats
from bigload.units import format_size, parse_size
from harness import machine, show_status
from run_contenders import BIGLOAD, PLAIN, RUNTIMES, CannotRunError, PreparedRuntime, files_of

DEFAULT_ROUNDS = 5
_PROCESSES = 3
_ROUNDING = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
"""Relative differences due to rounding where many products are added: those of torch.testing.assert_close."""


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """Difference of two outputs: none, within rounding of the dtype, or the largest one; `None` for other shapes."""

    is_identical: bool
    is_within_rounding: bool
    max_difference: float | None


@dataclass(kw_only=True)
class RunBench:
    """Measurements of all runtimes on one model, with the conditions they were taken under."""

    planned: PlannedModel
    cache: CacheState
    num_forwards: int
    measured: Mapping[str, Measured] = field(default_factory=dict)
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    raw_names: tuple[str, ...] = ()
    forwards: tuple[ForwardStats, ...] = ()

    @property
    def disk_bytes(self) -> int:
        """Bytes that the plan leaves on disk."""
        return sum(self.planned.checkpoint.tensors[name].num_bytes for name in self.planned.on_disk)

    def median(self, name: str) -> float | None:
        """Return the median seconds of a run, `None` if there was none."""
        return self.measured[name].median_seconds if name in self.measured else None

    @property
    def read_seconds(self) -> float | None:
        """Seconds that reading the streamed bytes takes at the best raw rate; cold, everything is read once."""
        best = min((self.measured[name].median_seconds for name in self.raw_names), default=None)
        if best is None or self.cache is CacheState.COLD:
            return best
        streamed = [each.bytes_from_ram + (each.bytes_from_disk or 0) for each in self.forwards] or [0]
        return best * statistics.fmean(streamed) * self.num_forwards / self.disk_bytes

    @property
    def bound_seconds(self) -> float | None:
        """The time that no run can beat, the longer of computing and reading."""
        return max((each for each in (self.median(PLAIN), self.read_seconds) if each is not None), default=None)

    def rows(self) -> Iterator[tuple[str, float, tuple[float, ...]]]:
        """Yield name, median and all seconds of every runtime and raw read, then the bound."""
        for name, measured in self.measured.items():
            yield name, measured.median_seconds, measured.seconds
        if self.bound_seconds is not None:
            yield "max(compute, raw read)", self.bound_seconds, ()

    def document(self) -> dict[str, object]:
        """Return everything as plain JSON values."""
        return {
            "machine": machine(),
            "path": self.planned.checkpoint.path,
            "total_bytes": self.planned.checkpoint.total_bytes,
            "disk_bytes": self.disk_bytes,
            "cache": str(self.cache),
            "num_forwards": self.num_forwards,
            "bound_seconds": self.bound_seconds,
            "run_seconds": {name: measured.seconds for name, measured in self.measured.items()},
            "cached": {name: measured.cached for name, measured in self.measured.items()},
            "max_difference": {name: output.max_difference for name, output in self.outputs.items()},
            "problems": self.problems,
        }


def compare_outputs(output: torch.Tensor, expected: torch.Tensor) -> OutputComparison:
    """Compare `output` with `expected`; sums in another order differ in the last bits only."""
    is_identical = torch.equal(output, expected)
    if is_identical or output.shape != expected.shape or not output.numel():
        return OutputComparison(is_identical, is_identical, 0.0 if is_identical else None)
    difference = float((output.double() - expected.double()).abs().max())
    tolerance = _ROUNDING.get(output.dtype, 0.0) * float(expected.double().abs().max())
    is_within = output.dtype == expected.dtype and difference <= tolerance  # False for NaN
    return OutputComparison(is_identical, is_within, difference)


def run_once(planned: PlannedModel, tokens: int, new_tokens: int) -> Callable[[nn.Module], torch.Tensor]:
    """Return what is timed: one forward, or greedy decoding of `new_tokens` with the KV cache."""
    inputs = planned.inputs(tokens)

    def run(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            output = model(**inputs)
            for _ in range(new_tokens - 1):
                cache = getattr(output, "past_key_values", None)
                if cache is None or "decoder_input_ids" in inputs:
                    raise CannotRunError(f"{type(model).__name__} cannot decode tokens one by one")
                chosen = output.logits[:, -1:].argmax(-1).to(inputs["input_ids"].device)
                output = model(input_ids=chosen, past_key_values=cache)
        found: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
        synchronize(found.device)
        return found

    return run


@dataclass(frozen=True, kw_only=True)
class RuntimeContender(Contender):
    """A runtime that runs `model`, or without one builds its model anew in each turn.

    Models that stay are for warm runs: their turns can be single runs, a fraction of a second apart, so a slow second
    of the machine meets all contenders. Cold, their mapped pages would keep the page cache warm.

    `forwards` receives the statistics of the timed forwards of the last turn.
    """

    prepared: PreparedRuntime
    work: Callable[[nn.Module], torch.Tensor]
    num_forwards: int
    model: nn.Module | None = None
    forwards: list[ForwardStats] = field(default_factory=list)

    @contextmanager
    def turn(self) -> Iterator[Callable[[], object]]:
        """Yield the function to time; see `Contender`."""
        model = self.model
        if model is None:
            model = self.prepared.make()
            evict_verified(self.prepared.files)
        yield partial(self.work, model)
        stats = stats_of(model)
        self.forwards[:] = () if stats is None else stats.forwards[-self.num_forwards :]


def bench_run(
    planned: PlannedModel,
    *,
    tokens: int = 1,
    new_tokens: int = 0,
    rounds: int = DEFAULT_ROUNDS,
    cold: bool = False,
    peers: bool = True,
    more: Sequence[Contender] = (),
    on_run: Callable[[str], None] = show_status,
) -> RunBench:
    """Run everything in turns, and the contenders `more`, and return the measurements."""
    cache = CacheState.COLD if cold else CacheState.AS_IS
    bench = RunBench(planned=planned, cache=cache, num_forwards=max(new_tokens, 1))
    work = run_once(planned, tokens, new_tokens)
    with ExitStack() as opened:
        if not cold:
            warm(files_of(planned))
        contenders = dict(_first_runs(bench, work, opened, peers=peers, is_cold=cold, on_run=on_run))
        files = [file for contender in contenders.values() for file in contender.prepared.files]
        names = set(planned.on_disk)
        stored = {name: tensor for name, tensor in planned.checkpoint.tensors.items() if name in names}
        on_disk = replace(planned.checkpoint, tensors=stored)
        kind = RawKind.DISK if cold and can_read_direct(files_of(planned)) else RawKind.MAP
        reads = raw_reads([kind] if stored else [], num_cores=len(os.sched_getaffinity(0)))
        outcome = run_rounds(
            [
                *contenders.values(),
                *(Contender(name=r.name, run=partial(raw_read, r, on_disk), warm_ups=not cold) for r in reads),
                *more,
            ],
            runs=rounds,
            files=list(dict.fromkeys(files)),
            cache=cache,
            on_run=on_run,
        )
    bench.measured = outcome.measured
    bench.problems |= {name: f"{type(error).__name__}: {error}" for name, error in outcome.failures.items()}
    bench.raw_names = tuple(read.name for read in reads)
    bench.forwards = tuple(contenders[BIGLOAD].forwards)
    return bench


def _first_runs(
    bench: RunBench,
    work: Callable[[nn.Module], torch.Tensor],
    opened: ExitStack,
    *,
    peers: bool,
    is_cold: bool,
    on_run: Callable[[str], None],
) -> Iterator[tuple[str, RuntimeContender]]:
    """Yield the runtimes that can run, each after one untimed run whose output is compared with the first one's."""
    expected: torch.Tensor | None = None
    for runtime in RUNTIMES:
        if runtime.package is not None and (not peers or runtime.version is None):
            bench.problems[runtime.name] = "not installed" if peers else "left out"
            continue
        on_run(f"{runtime.name}: first run")
        try:
            prepared = runtime.prepare(bench.planned, opened)
            model = prepared.make()
            output = work(model).detach().to("cpu", copy=True)
        except Exception as error:
            if runtime.name == BIGLOAD:
                raise
            bench.problems[runtime.name] = f"{type(error).__name__}: {error}"
            continue
        expected = output if expected is None else expected
        bench.outputs[runtime.name] = compare_outputs(output, expected)
        yield (
            runtime.name,
            RuntimeContender(
                name=runtime.name,
                run=lambda: None,
                may_fail=runtime.name != BIGLOAD,
                prepared=prepared,
                work=work,
                num_forwards=bench.num_forwards,
                model=None if is_cold and prepared.files else model,
            ),
        )
        del model


ANSWER, BARE = "answer of bigload run", "bare generate"

_SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = tokenizer("hello", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(tokens, max_new_tokens=1, do_sample=False)[0]))
"""


class _Clock:
    """A streamer of transformers that notes when each token comes, and the answer of a user who never stops one."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def put(self, _tokens: object) -> None:
        self._times.append(time.perf_counter())

    def end(self) -> None:
        pass

    def __call__(self) -> bool:
        self.put(None)
        return False

    def of_last(self, num_tokens: int) -> list[float]:
        """Return the seconds of each of the last tokens but the first."""
        return [later - earlier for earlier, later in pairwise(self._times[-num_tokens:])]


def bench_verb(planned: PlannedModel, *, new_tokens: int, rounds: int) -> Iterator[tuple[str, Sequence[float]]]:
    """Yield seconds of tokens in answers and in a bare `generate`, then those of whole processes until one token."""
    yield from _times_of_tokens(planned, new_tokens, rounds).items()
    folder = str(planned.checkpoint.root)
    verb = [sys.executable, "-m", "bigload_cli", "run", folder, "-p", "hello", "--raw", "-n", "1", "--temperature", "0"]
    commands = {"process of bigload run": verb, "process of a bare script": [sys.executable, "-c", _SCRIPT, folder]}
    processes = [
        Contender(name=name, run=partial(subprocess.run, command, check=True, capture_output=True))
        for name, command in commands.items()
    ]
    found = run_rounds(processes, runs=_PROCESSES, files=[], on_run=show_status).measured
    yield from ((name, measured.seconds) for name, measured in found.items())


def _times_of_tokens(planned: PlannedModel, new_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the median seconds of a token in each of many short answers, by turns: a slow second meets both."""
    tokenizer = FolderTokenizer.of(planned.checkpoint, asked_by="bench_run.py", is_raw=True)
    tokens = tokenizer.tokens_of(Prompt(text="the sky is blue because"))
    model: Any = planned.dispatched()
    generator = TextGenerator(planned, model, sampling=Sampling(temperature=0), decode=tokenizer.decode)
    model.generation_config.eos_token_id = None  # all answers are of the same length
    ids = torch.tensor([tokens], device=planned.device)

    def answer(clock: _Clock) -> None:
        with Path(os.devnull).open("w") as terminal:
            show = partial(print, end="", file=terminal, flush=True)
            generator.answer(tokens, max_new_tokens=new_tokens, on_text=show, is_stopped=clock)

    def bare(clock: _Clock) -> None:
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, streamer=clock)

    found: dict[str, list[float]] = {ANSWER: [], BARE: []}
    turns = [(ANSWER, answer), (BARE, bare)]
    for number in range(rounds + 1):
        for name, run in turns if number % 2 else reversed(turns):
            clock = _Clock()
            run(clock)
            if number:  # the first round warms up
                found[name].append(statistics.median(clock.of_last(new_tokens)))
    return found


def table(bench: RunBench) -> Iterator[str]:
    """Yield the lines of a Markdown table, and what is worth knowing about it."""
    plain, own = bench.median(PLAIN), bench.median(BIGLOAD)
    yield "| | median, s | min … max, s | times plain | times bigload |"
    yield "| --- | --: | --: | --: | --: |"
    for name, median, seconds in bench.rows():
        spread = f"{min(seconds):.3f} … {max(seconds):.3f}" if seconds else ""
        times = [f"{median / base:.2f}" if base else "" for base in (plain, own)]
        yield f"| {name} | {median:.3f} | {spread} | {' | '.join(times)} |"
    yield ""
    for name, output in bench.outputs.items():
        if not output.is_identical:
            kind = "within rounding" if output.is_within_rounding else "BEYOND ROUNDING"
            yield f"Output of {name} differs, {kind}: by up to {output.max_difference}."
    for name, problem in bench.problems.items():
        yield f"{name} was not measured: {problem}"
    if bench.forwards:
        last = bench.forwards[-1]
        overlap = "-" if last.overlap is None else f"{last.overlap:.0%}"
        yield (
            f"The last forward of bigload waited {last.wait_seconds:.3f} s for weights, overlap {overlap}, peak "
            f"{format_size(last.peak_bytes)} of streamed weights."
        )
    least = min((measured.cached[0] for measured in bench.measured.values()), default=0.0)
    largest = max((measured.cached[1] for measured in bench.measured.values()), default=0.0)
    yield f"Page cache at the start of runs: {least:.0%} to {largest:.0%} of the files."


def main() -> int:
    """Measure the model in a folder and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS)
    parser.add_argument("--cold", action="store_true", help="evict all files before each run")
    parser.add_argument("--prefetch-bytes", type=parse_size)
    parser.add_argument("--resident-bytes", type=parse_size)
    parser.add_argument("--threads", type=int, help="threads that torch computes with")
    parser.add_argument("--no-peers", action="store_true", help="leave out accelerate and transformers")
    parser.add_argument("--verb", action="store_true", help="time bigload run beside bare scripts of transformers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    asked = parser.parse_args()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    planned = PlannedModel.open(
        asked.model,
        asked.plan,
        asked_by="bench_run.py",
        keeps_cache=asked.verb or asked.new_tokens > 1,
        prefetch_bytes=asked.prefetch_bytes,
        resident_bytes=asked.resident_bytes,
    )
    if asked.verb:
        found: dict[str, Sequence[float]] = {}
        for name, seconds in bench_verb(planned, new_tokens=asked.new_tokens or 9, rounds=asked.rounds):
            low, middle, high = statistics.quantiles(seconds, n=4)
            print(f"{name:28}{middle:9.4f} s   half of {len(seconds)}: {low:.4f} to {high:.4f}", flush=True)
            found[name] = seconds
            if name == BARE:
                ratios = sorted(map(operator.truediv, found[ANSWER], found[BARE]))
                ratios = ratios[len(ratios) // 4 : -(len(ratios) // 4) or None]
                print(f"a token of an answer, in times of a bare one: {statistics.fmean(ratios):.3f}", flush=True)
        return 0
    bench = bench_run(
        planned,
        tokens=asked.tokens,
        new_tokens=asked.new_tokens,
        rounds=asked.rounds,
        cold=asked.cold,
        peers=not asked.no_peers,
    )
    print("\n".join(table(bench)))
    if asked.json is not None:
        asked.json.write_text(json.dumps(bench.document(), indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
