"""Measure how long headers of GGUF files take, with tokenizers of several sizes.

    python benchmarks/bench_gguf_headers.py [--rounds 9] [--folder FOLDER]

Each file has 1,000 tensors in Q4_K, tokens and merges of random letters, and data (a hole of 1 GiB). `header` is the
header by itself, `open` a checkpoint with its config, both in this process; `inspect` is the program with its start.
Files are in the page cache. The figures are the least and the median of all rounds; the CPU time of this process says
more on a machine that does other work. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bigload.checkpoint.formats.registry import read_shard_header
from bigload.checkpoint.source import open_checkpoint
from bigload.units import GIB
from harness import Goal

SIZES = {"none": (10, 10), "llama 3": (128_256, 280_147), "gpt-oss": (201_088, 446_189), "280k": (280_000, 280_000)}
"""Tokens and merges."""

GOAL_MS = 60


def main() -> None:
    """Print the figures of each size."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    for name, (num_tokens, num_merges) in SIZES.items():
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            path = write(Path(folder, "model.gguf"), num_tokens, num_merges)
            kinds: dict[str, Callable[[], object]] = {
                "header": partial(read_shard_header, path, path.name),
                "open": partial(open_checkpoint, path),
                "inspect": partial(inspect, path),
            }
            found = {kind: [seconds(run) for _ in range(arguments.rounds)] for kind, run in kinds.items()}
        print(f"{name}: {num_tokens} tokens, {num_merges} merges")
        for kind, times in found.items():
            wall, cpu = ([each[number] * 1000 for each in times] for number in (0, 1))
            text = f"  {kind:<8} {min(wall):6.1f} ms at least, {statistics.median(wall):6.1f} median"
            print(text if kind == "inspect" else f"{text}; CPU {min(cpu):6.1f} and {statistics.median(cpu):6.1f}")
        least = min(wall for wall, _ in found["header"]) * 1000
        print(Goal(text="header", value=least, bound=GOAL_MS, is_least=False, unit="ms"))


def write(path: Path, num_tokens: int, num_merges: int) -> Path:
    """Write a file with such a tokenizer."""
    from gguf_files import gguf_bytes  # noqa: PLC0415 - harness has made it importable

    source = random.Random(0)
    tokens = [
        "".join(source.choices("abcdefghijklmnopqrstuvwxyzĠé", k=source.randint(1, 12))) for _ in range(num_tokens)
    ]
    merges = [f"{source.choice(tokens)} {source.choice(tokens)}" for _ in range(num_merges)]
    tensors = {f"blk.{number // 9}.tensor_{number % 9}.weight": (12, (1, 256)) for number in range(1000)}
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * num_tokens,
        "tokenizer.ggml.merges": merges,
    }
    path.write_bytes(gguf_bytes(tensors, metadata))  # type: ignore[no-untyped-call]
    os.truncate(path, path.stat().st_size + GIB)
    return path


def inspect(path: Path) -> None:
    """Run the program."""
    command = [sys.executable, "-m", "bigload", "inspect", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Return how long a call takes, and the CPU time of this process."""
    began, began_cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - began, time.process_time() - began_cpu


if __name__ == "__main__":
    main()
