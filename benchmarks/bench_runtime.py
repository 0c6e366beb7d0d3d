"""Measure forwards of a model whose weights are on disk, and hold them against bigload's goals.

    python benchmarks/bench_runtime.py [--rounds 5] [--model FOLDER] [--tokens 1 128] [--markdown benchmarks/runtime.md]

The model is `llama-3gb`, a Llama of 2.6 GiB in 24 blocks, made in a folder that goes afterwards, or one that is there.
Room for three times that on the disk is needed, and of memory for twice that and what the page cache is to hold.

bigload has memory for four blocks: the one that runs, and a window of three. It takes turns with the model in memory,
with accelerate's `disk_offload`, with transformers' device map, and with raw reads of the same bytes, in another order
each round; each turn makes its model anew and begins with none of it in the page cache, which is looked at. Cold is the
first forward; warm are three more after it, which find in the page cache what that left there. All figures are medians,
and a ratio is one of medians of the same rounds. Memory is that of a process of its own, seen from outside: RssAnon of
proc(5), every two milliseconds.

Nothing here decides a test: figures differ from machine to machine and from hour to hour; compare those of one run.
"""

from __future__ import annotations

import argparse
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from bench_run import bench_run, run_once, table
from bigload.bench.run_model import PlannedModel
from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.machine.process_memory import resident_memory
from bigload.units import MIB, format_size
from harness import Goal, processor
from make import load_recipe, make
from run_contenders import BIGLOAD, PLAIN, RUNTIMES

WINDOW_BLOCKS = 3
SPARE_BYTES = 64 * MIB
RECIPE = "llama-3gb"

_SAMPLE_SECONDS = 0.002


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the model, measure, print, and write the same as Markdown where asked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help=f"a folder with a model; {RECIPE} is made when left out")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to make it")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--threads", type=int, default=2, help="threads that torch computes with")
    parser.add_argument("--only", nargs="+", choices=("warm", "cold", "resident", "memory"), help="some parts")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    if asked.worker is not None:
        work_alone(asked.worker, open_checkpoint(asked.model), asked.tokens[0])
        return
    with ExitStack() as made:
        folder = asked.model
        if folder is None:
            folder = Path(made.enter_context(tempfile.TemporaryDirectory(prefix="bench-runtime-", dir=asked.folder)))
            folder /= RECIPE
            print(f"making {RECIPE}", file=sys.stderr, flush=True)
            make(load_recipe(RECIPE), folder, data="random")
        bench = RuntimeBench(open_checkpoint(folder), rounds=asked.rounds, threads=asked.threads)
        bench.run(asked.tokens, asked.only or ("warm", "cold", "resident", "memory"))
        if asked.markdown is not None:
            asked.markdown.parent.mkdir(parents=True, exist_ok=True)
            asked.markdown.write_text(bench.markdown(), encoding="utf-8")
            print(f"Wrote {asked.markdown}.")


class RuntimeBench:
    """All parts on one model; collects lines and goals."""

    def __init__(self, checkpoint: Checkpoint, *, rounds: int, threads: int) -> None:
        self.checkpoint = checkpoint
        self.rounds = rounds
        self.threads = threads
        self.block_bytes, self.num_blocks = blocks_of(checkpoint)
        self.goals: list[Goal] = []
        self._lines: list[str] = []

    def run(self, tokens: Sequence[int], parts: Sequence[str]) -> None:
        """Measure `parts` for each count of tokens; print tables and goals."""
        self._say(f"# A model run from disk\n\n{self.conditions()}\n")
        for count in tokens:
            if "memory" in parts:
                self.memory(count)
            if "warm" in parts:
                self.timed(count, "warm", {PLAIN: 1.35, "accelerate": 2.5, "transformers": 1.6})
            if "cold" in parts:
                self.timed(count, "cold", {"accelerate": 1.5, "transformers": 1.5}, is_cold=True)
            if "resident" in parts:
                everything = 2 * self.checkpoint.total_bytes
                self.timed(count, "all resident", {PLAIN: 1.02}, resident_bytes=everything, peers=False)
        self._say("## Goals\n")
        for goal in self.goals:
            self._say(f"- {goal}")

    def markdown(self) -> str:
        """Return all that was printed, which is Markdown."""
        return "<!-- made by benchmarks/bench_runtime.py -->\n" + "\n".join(self._lines) + "\n"

    def conditions(self) -> str:
        """Return the model, the machine and the method."""
        return (
            f"{self.checkpoint.name}: {format_size(self.checkpoint.total_bytes)} in {self.num_blocks} blocks of "
            f"{format_size(self.block_bytes)} and what is around them. {len(os.sched_getaffinity(0))} cores "
            f"({processor()}), {self.threads} threads, torch {torch.__version__}, {self.rounds} rounds by turns, "
            f"medians; load {os.getloadavg()[0]:.1f} at the beginning. bigload has a window of {WINDOW_BLOCKS} blocks, "
            f"and keeps none."
        )

    def timed(
        self,
        tokens: int,
        state: str,
        goals: Mapping[str, float],
        *,
        is_cold: bool = False,
        resident_bytes: int = 0,
        peers: bool = True,
    ) -> None:
        """Time forwards in one state; `goals` has the bound of bigload / plain, and those of others / bigload."""
        window = WINDOW_BLOCKS * self.block_bytes
        planned = planned_model(self.checkpoint, prefetch_bytes=window, resident_bytes=resident_bytes)
        bench = bench_run(planned, tokens=tokens, rounds=self.rounds, cold=is_cold, peers=peers)
        self._say(f"## {tokens} tokens, {state}\n")
        for line in table(bench):
            self._say(line)
        self._say("")
        own, bound = bench.median(BIGLOAD), bench.bound_seconds
        if own and bound and is_cold:
            text = f"{tokens} tokens, {state}: bigload / max(compute, raw read)"
            self.goals.append(Goal(text=text, value=own / bound, bound=1.1, is_least=False))
        for name, goal in goals.items():
            other = bench.median(name)
            if not own or not other:
                continue
            if name == PLAIN:
                text = f"{tokens} tokens, {state}: bigload / plain"
                self.goals.append(Goal(text=text, value=own / other, bound=goal, is_least=False))
            else:
                text = f"{tokens} tokens, {state}: times as fast as {name}"
                self.goals.append(Goal(text=text, value=other / own, bound=goal))

    def memory(self, tokens: int) -> None:
        """Print the most private memory of each runtime above that of its process before, seen from outside."""
        self._say(f"## {tokens} tokens, private memory\n")
        for runtime in RUNTIMES:
            if runtime.package is None or runtime.version is not None:
                peak = peak_of_worker(runtime.name, self.checkpoint.root, tokens, self.threads)
                self._say(f"- {runtime.name}: {'failed' if peak is None else format_size(peak)}")
                if runtime.name == BIGLOAD and peak is not None:
                    bound = (WINDOW_BLOCKS + 1) * self.block_bytes + SPARE_BYTES
                    text = f"{tokens} tokens: private memory above the base, at most 4 blocks and 64 MiB"
                    goal = Goal(text=text, value=peak / MIB, bound=bound / MIB, is_least=False, unit="MiB")
                    self.goals.append(goal)
        self._say("")

    def _say(self, line: str) -> None:
        self._lines.append(line)
        print(line, flush=True)


def planned_model(checkpoint: Checkpoint, *, prefetch_bytes: int, resident_bytes: int) -> PlannedModel:
    """Return the model with everything on disk."""
    return PlannedModel.open(
        checkpoint, None, asked_by="bench_runtime.py", prefetch_bytes=prefetch_bytes, resident_bytes=resident_bytes
    )


def blocks_of(checkpoint: Checkpoint) -> tuple[int, int]:
    """Return the bytes of the largest block of a model with numbered layers, and how many there are."""
    sizes: dict[str, int] = {}
    for tensor in checkpoint.tensors.values():
        parts = tensor.name.split(".")
        number = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if number is not None:
            block = ".".join(parts[: number + 1])
            sizes[block] = sizes.get(block, 0) + tensor.num_bytes
    return max(sizes.values()), len(sizes)


def work_alone(name: str, checkpoint: Checkpoint, tokens: int) -> None:
    """Be the process whose memory is sampled: prepare, wait for a line, run the model three times."""
    runtime = next(runtime for runtime in RUNTIMES if runtime.name == name)
    block_bytes, _ = blocks_of(checkpoint)
    planned = planned_model(checkpoint, prefetch_bytes=WINDOW_BLOCKS * block_bytes, resident_bytes=0)
    with ExitStack() as opened:
        prepared, run = runtime.prepare(planned, opened), run_once(planned, tokens, 0)
        torch.nn.functional.linear(torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16))
        _tell("ready")
        model = prepared.make()
        _tell("made")
        for _ in range(3):
            run(model)
        _tell("done")


def peak_of_worker(name: str, folder: Path, tokens: int, threads: int) -> int | None:
    """Return the most private memory that forwards of `name` took, in a process of its own; `None` if it failed."""
    print(f"  memory of {name}", file=sys.stderr, flush=True)
    words = ["--worker", name, "--model", str(folder), "--tokens", str(tokens), "--threads", str(threads)]
    with subprocess.Popen(
        [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        if not worker.stdout.readline():
            return None
        process = Path(f"/proc/{worker.pid}")
        base = resident_memory(process).private_bytes
        worker.stdin.write("\n")
        worker.stdin.flush()
        if not worker.stdout.readline():  # made: what making took is not looked at
            return None
        peak = resident_memory(process).private_bytes
        worker.stdin.write("\n")
        worker.stdin.flush()
        while not select.select([worker.stdout], [], [], _SAMPLE_SECONDS)[0]:
            peak = max(peak, resident_memory(process).private_bytes)
        if not worker.stdout.readline():
            return None
        worker.stdin.write("\n")
        worker.stdin.flush()
    return peak - base


def _tell(word: str) -> None:
    print(word, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
