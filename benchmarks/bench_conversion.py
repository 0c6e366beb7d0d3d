"""Measure loads of a checkpoint whose experts transformers 5 fuses, beside `from_pretrained`, and print it.

    python benchmarks/bench_conversion.py [--gib 4] [--rounds 3] [--folder FOLDER] [--state warm] [--memory ready]

A checkpoint in the form of Mixtral, each expert in tensors of its own, is made in FOLDER or in the temporary folder.
Each load is a process of its own, in rotating order; the first round is not counted. A load counts from an empty model
on until all weights are there; imports and the making of the empty model do not count. Peaks are sampled: `private` is
anonymous memory, `resident` that and the most pages of files. The floor is what this machine takes for the same bytes:
`preadv` into fresh huge pages, nothing else. A host may back the memory of a virtual machine at its first touch, which
takes longer than all else and hits whoever comes first: so each process faults in as much memory as the weights take
and gives it back, before it loads (`--memory as-is` does without). Needs transformers. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

import bigload
from bigload.bench.fresh_memory import renew
from bigload.bench.page_cache_state import CacheState, prepare
from bigload.checkpoint.byte_source import PositionalReader
from bigload.loading.scheduling.read_jobs import BLOCK_BYTES
from bigload.machine.memory.huge_pages import Buffer, allocate
from bigload.machine.memory.process_memory import MemorySampler
from bigload.machine.threads.thread_pool import default_threads, run_jobs
from bigload.units import GIB, MIB
from harness import Goal, in_rounds

if TYPE_CHECKING:
    import transformers

HIDDEN, INNER, EXPERTS, VOCABULARY = 1024, 3584, 8, 32000
LAYER_BYTES = 2 * 3 * EXPERTS * HIDDEN * INNER
OURS, DISPATCH, THEIRS, FLOOR = "bigload.load(into=)", "load_checkpoint_and_dispatch", "from_pretrained", "floor"


def main() -> None:
    """Print the figures of all contenders, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--state", choices=["warm", "cold"], default="warm")
    parser.add_argument("--memory", choices=["ready", "as-is"], default="ready")
    parser.add_argument("--child", choices=list(LOADS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        prepare_load = LOADS[arguments.child]
        print(json.dumps(measured(prepare_load, arguments.folder, is_memory_ready=arguments.memory == "ready")))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        make(Path(folder), layers=max(round(arguments.gib * GIB / LAYER_BYTES), 1))
        checkpoint = bigload.open_checkpoint(folder)
        state = CacheState(arguments.state)
        print(f"{checkpoint.total_bytes / GIB:.2f} GiB in {len(checkpoint.tensors)} tensors, {arguments.state} cache")
        loads = {name: partial(child, name, Path(folder), state, arguments.memory) for name in LOADS}
        runs = in_rounds(loads, rounds=arguments.rounds)
        show(runs, checkpoint.total_bytes)


def peer() -> ModuleType:
    """Return transformers, an extra that the help of this script does without."""
    return import_module("transformers")


def config(layers: int) -> transformers.MixtralConfig:
    """Return the configuration of the model."""
    return peer().MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        vocab_size=VOCABULARY,
        dtype="bfloat16",
    )


def make(folder: Path, *, layers: int) -> None:
    """Write the checkpoint, a file for each layer."""
    whole = config(layers)
    whole.architectures = ["MixtralForCausalLM"]
    whole.save_pretrained(folder)
    head = HIDDEN // 16
    places: dict[str, str] = {}
    torch.manual_seed(0)
    for layer in range(-1, layers):
        prefix = f"model.layers.{layer}"
        shapes = {
            f"{prefix}.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (4 * head, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (4 * head, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
        }
        for expert in range(EXPERTS):
            one = f"{prefix}.block_sparse_moe.experts.{expert}"
            shapes |= {f"{one}.w1.weight": (INNER, HIDDEN), f"{one}.w3.weight": (INNER, HIDDEN)}
            shapes[f"{one}.w2.weight"] = (HIDDEN, INNER)
        if layer < 0:
            table = (VOCABULARY, HIDDEN)
            shapes = {"model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": (HIDDEN,)}
        file = f"model-{layer + 2:05}-of-{layers + 1:05}.safetensors"
        tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def empty(folder: Path) -> transformers.PreTrainedModel:
    """Return the model without weights."""
    with bigload.init_empty_weights(include_buffers=False):
        return peer().MixtralForCausalLM(peer().MixtralConfig.from_pretrained(folder)).to(torch.bfloat16)


def load_into(folder: Path) -> Callable[[], object]:
    """Prepare `bigload.load`."""
    model = empty(folder)
    return lambda: bigload.load(folder, into=model)


def load_and_dispatch(folder: Path) -> Callable[[], object]:
    """Prepare `bigload.load_checkpoint_and_dispatch`."""
    model = empty(folder)
    return lambda: bigload.load_checkpoint_and_dispatch(model, folder, {"": "cpu"})


def from_pretrained(folder: Path) -> Callable[[], object]:
    """Prepare transformers' own loader, which makes the empty model itself: some milliseconds."""
    peer().utils.logging.disable_progress_bar()
    return lambda: peer().MixtralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def floor(folder: Path) -> Callable[[], object]:
    """Prepare reads of all files into fresh memory, by a thread for each core."""
    return lambda: read_whole(sorted(folder.glob("*.safetensors")))


def read_whole(files: Sequence[Path]) -> list[Buffer]:
    """Read `files` into memory in blocks."""
    buffers = []
    with ExitStack() as opened:
        reads = []
        for file in files:
            source = PositionalReader(file)
            opened.callback(source.close)
            size = file.stat().st_size
            buffers.append(allocate(size))
            view = memoryview(buffers[-1])[:size]
            reads += [(source, view[at : at + BLOCK_BYTES], at) for at in range(0, size, BLOCK_BYTES)]
        run_jobs(lambda read: read[0].read_into([read[1]], read[2]), reads, threads=default_threads())
    return buffers


LOADS = {OURS: load_into, DISPATCH: load_and_dispatch, THEIRS: from_pretrained, FLOOR: floor}


def measured(
    prepare_load: Callable[[Path], Callable[[], object]], folder: Path, *, is_memory_ready: bool
) -> dict[str, float]:
    """Load once, and return seconds and peaks beside what was there before."""
    load = prepare_load(folder)
    if is_memory_ready:
        renew(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    with MemorySampler() as sampler:
        began, used = time.perf_counter(), time.process_time()
        kept = load()
        seconds, processor = time.perf_counter() - began, time.process_time() - used
    del kept
    peak = sampler.peak
    resident = peak.private_bytes + peak.file_bytes
    return {"seconds": seconds, "cpu": processor, "private": peak.private_bytes, "resident": resident}


def child(name: str, folder: Path, state: CacheState, memory: str) -> dict[str, float]:
    """Measure one load in a process of its own."""
    for left in prepare(sorted(folder.glob("*.safetensors")), state):
        print(f"  not {state}: {left}")
    command = [sys.executable, __file__, "--child", name, "--folder", str(folder), "--memory", memory]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(runs: dict[str, list[dict[str, float]]], num_bytes: int) -> None:
    """Print medians and goals."""
    medians = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()
    }
    for name, found in medians.items():
        beside = (found["private"] - num_bytes) / MIB
        private = f"private {found['private'] / GIB:5.2f} GiB ({beside:+.0f} MiB beside the weights)"
        seconds = f"{found['seconds']:6.2f} s (CPU {found['cpu']:6.2f})"
        print(f"{name:<30} {seconds}  {private}  resident {found['resident'] / GIB:5.2f} GiB")
    ours, theirs = medians[OURS], medians[THEIRS]
    faster = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(runs[THEIRS], runs[OURS], strict=True))
    print(Goal(text="load(into=) faster than from_pretrained, median of rounds", value=faster, bound=1.5))
    peak = 100 * ours["resident"] / theirs["resident"]
    print(Goal(text="resident peak beside from_pretrained's", value=peak, bound=60, is_least=False, unit="%"))
    beside = (ours["private"] - num_bytes) / MIB
    print(Goal(text="private memory beside the weights", value=beside, bound=96, is_least=False, unit="MiB"))


if __name__ == "__main__":
    main()
