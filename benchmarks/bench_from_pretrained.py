"""Measure transformers' `from_pretrained` with its own reader and with bigload's, and print it.

    python benchmarks/bench_from_pretrained.py [--gib 4] [--rounds 3] [--folder FOLDER] [--memory ready]
        [--shape mixtral] [--shape llama] [--state warm] [--state cold]

Two checkpoints are made in FOLDER or in the temporary folder: one in the form of Mixtral, whose experts transformers 5
fuses, and a dense one in that of Llama. Each load is a process of its own, in rotating order, from a warm and from a
cold page cache; the first round is not counted. A load counts from the call until a byte of each page of all weights
was read: pages that are only mapped are no answer yet. Imports do not count: each process loads a tiny model before.
See `bench_conversion.py` for `--memory`.
Needs transformers. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import bench_conversion
import torch
from bench_conversion import peer

import bigload
from bigload.bench.fresh_memory import renew
from bigload.bench.page_cache_state import CacheState, prepare
from bigload.units import GIB
from harness import Goal, in_rounds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PAGE_BYTES = 4096
THEIRS, OURS = "from_pretrained", "through bigload"
GOALS = {"mixtral": 1.5, "llama": 1.0}


def main() -> None:
    """Print the figures of both readers, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--shape", choices=list(GOALS), action="append")
    parser.add_argument("--state", type=CacheState, choices=[CacheState.WARM, CacheState.COLD], action="append")
    parser.add_argument("--memory", choices=["ready", "as-is"], default="ready")
    parser.add_argument("--child", choices=[THEIRS, OURS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        is_ready = arguments.memory == "ready"
        print(json.dumps(measured(arguments.child, arguments.folder, is_memory_ready=is_ready)))
        return
    for shape in arguments.shape or GOALS:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            make(shape, Path(folder), round(arguments.gib * GIB))
            size = bigload.open_checkpoint(folder).total_bytes
            for state in arguments.state or (CacheState.WARM, CacheState.COLD):
                print(f"{shape}: {size / GIB:.2f} GiB, {state.value} cache")
                loads = {name: partial(child, name, Path(folder), state, arguments.memory) for name in (THEIRS, OURS)}
                show(in_rounds(loads, rounds=arguments.rounds), GOALS[shape])


def make(shape: str, folder: Path, num_bytes: int) -> None:
    """Write a checkpoint of about `num_bytes`, and in its folder `tiny` one of the same kind to warm up with."""
    kinds = {"mixtral": peer().MixtralForCausalLM, "llama": peer().LlamaForCausalLM}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 16}
    tiny = kinds[shape].config_class(**sizes, num_attention_heads=2, num_key_value_heads=2, dtype="bfloat16")
    kinds[shape](tiny).to(torch.bfloat16).save_pretrained(folder / "tiny")
    if shape == "mixtral":
        bench_conversion.make(folder, layers=max(num_bytes // bench_conversion.LAYER_BYTES, 1))
        return
    width, inner = 2048, 5632
    layer_bytes = 2 * (4 * width * width + 3 * width * inner)
    config = peer().LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=max(num_bytes // layer_bytes, 1),
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    peer().LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="1GB")
    torch.set_default_dtype(torch.float32)


def measured(name: str, folder: Path, *, is_memory_ready: bool) -> dict[str, float]:
    """Load once, and return seconds until the call returns and until all weights have been there."""
    peer().utils.logging.disable_progress_bar()
    kind = peer().AutoModelForCausalLM
    load = kind.from_pretrained if name == THEIRS else partial(bigload.transformers.from_pretrained, kind)
    load(folder / "tiny")
    if is_memory_ready:
        renew(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    began = time.perf_counter()
    model = load(folder)
    returned = time.perf_counter()
    touch(model)
    return {"returned": returned - began, "seconds": time.perf_counter() - began}


def touch(model: PreTrainedModel) -> None:
    """Read a byte of each page of all weights."""
    for parameter in model.parameters():
        parameter.detach().flatten().view(torch.uint8)[::PAGE_BYTES].sum()


def child(name: str, folder: Path, state: CacheState, memory: str) -> dict[str, float]:
    """Measure one load in a process of its own."""
    for left in prepare(sorted(folder.glob("*.safetensors")), state):
        print(f"  not {state.value}: {left}")
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--memory", memory]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(runs: dict[str, list[dict[str, float]]], goal: float) -> None:
    """Print medians, and how much faster bigload's reader is."""
    for name, found in runs.items():
        returned, seconds = (statistics.median(run[key] for run in found) for key in ("returned", "seconds"))
        print(f"  {name:<16} returns after {returned:6.2f} s, all weights read after {seconds:6.2f} s")
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(runs[THEIRS], runs[OURS], strict=True)]
    text = f"  faster, median of rounds ({min(ratios):.2f} to {max(ratios):.2f})"
    print(Goal(text=text, value=statistics.median(ratios), bound=goal))


if __name__ == "__main__":
    main()
