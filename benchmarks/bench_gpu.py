"""Check and measure on CUDA devices all that no machine without one can show, and write benchmarks/gpu.md.

    python benchmarks/bench_gpu.py [--rounds 3] [--device cuda] [--only PART ...] [--out FILE]
    python benchmarks/bench_gpu.py --device sim     # dry run on the accelerator that the tests simulate

Parts: the tests marked `gpu`; loading straight to the device beside other loaders; streaming beside the bound and
accelerate; whole models under a plan beside accelerate and transformers; hooks; predicted beside seen memory; ranks
over nccl. A part that cannot run says why, and the others go on. Ten minutes at most, 3 GiB of disk.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bigload
from bench_cuda_runtime import BlockModel, accelerator, compare, link_speed
from bigload.units import GIB, MIB, format_size
from harness import in_rounds, installed_version, machine, timed
from loader_peers import ALL_PEERS

FOLDER = Path(__file__).parent
PEERS = ("safetensors", "fastsafetensors", "runai-model-streamer", "transformers", "accelerate")
SHAPES = ((1, 64), (1, 512), (1, 2048), (4, 64), (4, 512), (4, 1024), (8, 256), (16, 128))
"""Sequences and tokens of each, for which memory is predicted and seen."""

PART_SECONDS = 150
"""How long a program that a part starts may take."""


class PartSkippedError(Exception):
    """A part cannot run here; the text says why."""


class Setting:
    """The device, the model and the effort that all parts share.

    Attributes:
        device: Device to measure.
        model: Folder of a Llama with a `config.json` and weights of random values.
        rounds: Rounds that count.
        is_dry: Whether the device is simulated: figures mean nothing.
    """

    def __init__(self, device: torch.device, model: Path, *, rounds: int) -> None:
        self.device = device
        self.model = model
        self.rounds = rounds
        self.is_dry = device.type == "sim"

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        accelerator(self.device).synchronize(self.device)


def tests(setting: Setting) -> Iterator[str]:
    """Run all tests marked `gpu`."""
    if setting.is_dry:
        raise PartSkippedError("the tests on simulated accelerators are a suite of their own, tests/simulated")
    yield from _program([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "tests"])


def loading(setting: Setting) -> Iterator[str]:
    """Load a checkpoint straight to the device, beside other loaders and one copy of as many bytes."""
    checkpoint = bigload.open_checkpoint(setting.model)
    contenders: dict[str, Callable[[], object]] = {
        "bigload": lambda: bigload.load(checkpoint, device=setting.device),
        "bigload, one thread": lambda: bigload.load(checkpoint, device=setting.device, threads=1),
    }
    skipped = []
    with ExitStack() as opened:
        target = import_module("bigload.bench.peers").PeerTarget(checkpoint, str(setting.device), opened)
        for peer in ALL_PEERS:
            if ".safetensors" not in peer.suffixes:
                continue
            if peer.version is None:
                skipped.append(f"{peer.name}: not installed (pip install {peer.package})")
                continue
            try:
                load = peer.ready(target)
                load()
            except Exception as error:
                skipped.append(f"{peer.name} {peer.version}: {type(error).__name__}: {error!s:.120}")
                continue
            contenders[f"{peer.name} {peer.version}"] = load
        works = {name: timed(work, synchronize=setting.synchronize) for name, work in contenders.items()}
        seconds = in_rounds(works, rounds=setting.rounds)
    yield f"{format_size(checkpoint.total_bytes)} from the page cache; {setting.rounds} rounds by turns."
    yield from _table(seconds, checkpoint.total_bytes)
    yield from (f"- not measured: {reason}" for reason in skipped)
    link = link_speed(setting.device, num_bytes=64 * MIB if setting.is_dry else GIB)
    seconds_by_link = checkpoint.total_bytes / link
    yield f"- the link: {format_size(int(link))}/s by one large copy, {seconds_by_link:.3f} s for these bytes"


def streaming(setting: Setting) -> Iterator[str]:
    """Stream blocks from RAM, pinned RAM and disk, beside max(compute, bytes / link) and accelerate."""
    asked = argparse.Namespace(
        blocks=4 if setting.is_dry else 24,
        width=64 if setting.is_dry else 4096,
        tokens=64,
        rounds=setting.rounds,
    )
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        yield from _fenced(compare(asked, Path(folder), setting.device))


def planned(setting: Setting) -> Iterator[str]:
    """Run the model with half of it on the device, beside accelerate and transformers."""
    if setting.is_dry:
        raise PartSkippedError("a plan names no simulated device")
    _require("transformers")
    total = bigload.open_checkpoint(setting.model).total_bytes
    plan = setting.model.parent / "plan.json"
    bigload.write_plan(bigload.plan(setting.model, {"cuda:0": total // 2 + 2 * GIB, "cpu": 2 * total}), plan)
    words = [str(FOLDER / "bench_run.py"), str(setting.model), "--plan", str(plan), "--rounds", str(setting.rounds)]
    yield from _program([sys.executable, *words])


def hooks(setting: Setting) -> Iterator[str]:
    """Run a model whose weights all are on the device, bare and with hooks on every block."""
    width, num_blocks = (64, 4) if setting.is_dry else (1024, 64)

    def resident() -> nn.Module:
        torch.manual_seed(0)
        return BlockModel(num_blocks, width).bfloat16().to(setting.device)

    models = {
        "bare": resident(),
        "bigload.dispatch_model": bigload.dispatch_model(resident(), {"": str(setting.device)}, force_hooks=True),
    }
    if installed_version("accelerate") is not None and not setting.is_dry:
        dispatch = import_module("accelerate").dispatch_model
        models["accelerate.dispatch_model"] = dispatch(resident(), {"": setting.device}, force_hooks=True)
    x = torch.ones(1, width, dtype=torch.bfloat16, device=setting.device)
    with torch.inference_mode():
        works = {
            name: timed(partial(model, x), repeats=2 if setting.is_dry else 20, synchronize=setting.synchronize)
            for name, model in models.items()
        }
        seconds = in_rounds(works, rounds=setting.rounds)
    yield f"{num_blocks} blocks of two layers, one token."
    yield from _table(seconds)
    if "accelerate.dispatch_model" not in models:
        yield "- accelerate is not measured: it is not installed, or knows no such device"


def memory(setting: Setting) -> Iterator[str]:
    """Compare what a plan predicts for the device with the most that torch allocates in a forward of the same shape."""
    _require("transformers")
    peak = getattr(accelerator(setting.device), "max_memory_allocated", None)
    if peak is None:
        raise PartSkippedError("this device type counts no peak of its memory")
    maker = import_module("transformers").AutoModelForCausalLM
    model = maker.from_pretrained(setting.model, dtype="auto", local_files_only=True).to(setting.device).eval()
    yield "| sequences x tokens | predicted, without overhead | seen | seen / predicted |"
    yield "|---|---|---|---|"
    for batch, context in SHAPES[:1] if setting.is_dry else SHAPES:
        plan = bigload.plan(setting.model, {"cuda:0": "1TiB"}, batch=batch, context=context)
        use = plan.devices[0]
        predicted = use.used_bytes - use.overhead_bytes
        accelerator(setting.device).reset_peak_memory_stats(setting.device)
        with torch.inference_mode():
            model(torch.zeros(batch, context, dtype=torch.int64, device=setting.device), use_cache=True)
            setting.synchronize()
        seen = peak(setting.device)
        yield f"| {batch} x {context} | {format_size(predicted)} | {format_size(seen)} | {seen / predicted:.2f} |"


def ranks(setting: Setting) -> Iterator[str]:
    """Load a model that is divided among as many ranks as there are devices, and compare every tensor."""
    backend, count = ("gloo", 2) if setting.is_dry else ("nccl", torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    yield from _program([*command, str(Path(__file__)), "--rank-of", backend, "--model", str(setting.model)])


def run_rank(backend: str, model: Path) -> None:
    """Be one of `ranks`: load each weight in rows, directly and from rank 0, and print what differs."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(backend)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    expected = bigload.load(model, device=str(device))
    for from_rank0 in (False, True):
        module = nn.Module()
        for number, value in enumerate(expected.values()):
            empty = torch.empty_like(value)
            part = distribute_tensor(empty, mesh, [Shard(0)]) if value.dim() == 2 else empty
            module.register_parameter(f"p{number}", nn.Parameter(part, requires_grad=False))
        names = {f"p{number}": name for number, name in enumerate(expected)}
        began = time.perf_counter()
        bigload.load_sharded(module, model, names=names, broadcast_from_rank0=from_rank0)
        seconds = time.perf_counter() - began
        wrong = 0
        for ours, name in names.items():
            found = module.get_parameter(ours).data
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            wrong += not torch.equal(whole, expected[name])
        if rank == 0:
            way = "broadcast from rank 0" if from_rank0 else "each reads its rows"
            print(f"{backend}, {mesh.size()} ranks, {way}: {seconds:.3f} s, {wrong} of {len(names)} tensors differ")
        if wrong:
            raise SystemExit(1)
    torch.distributed.destroy_process_group()


PARTS: Mapping[str, Callable[[Setting], Iterator[str]]] = {
    "tests": tests,
    "loading": loading,
    "streaming": streaming,
    "planned": planned,
    "hooks": hooks,
    "memory": memory,
    "ranks": ranks,
}


def _require(package: str) -> None:
    if installed_version(package) is None:
        raise PartSkippedError(f"{package} is not installed (pip install {package})")


def _table(seconds: Mapping[str, list[float]], num_bytes: int = 0) -> Iterator[str]:
    yield "| | median ms | best to worst | GB/s | beside the first |"
    yield "|---|---|---|---|---|"
    first = statistics.median(next(iter(seconds.values())))
    for name, found in seconds.items():
        median = statistics.median(found)
        spread = f"{min(found) * 1e3:.2f} to {max(found) * 1e3:.2f}"
        rate = f"{num_bytes / median / 1e9:.2f}" if num_bytes else ""
        yield f"| {name} | {median * 1e3:.2f} | {spread} | {rate} | {median / first:.2f} x |"


def _program(command: list[str]) -> Iterator[str]:
    """Yield the command and what it prints.

    Raises:
        RuntimeError: it failed; the text is what it said.
        subprocess.TimeoutExpired: it took too long.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PART_SECONDS, cwd=FOLDER.parent)
    shown = [word.replace(sys.executable, "python") for word in command]
    said = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    yield from _fenced([f"$ {shlex.join(shown)}", *said[-60:]])
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}")


def _fenced(lines: Iterator[str] | list[str]) -> Iterator[str]:
    yield "```"
    yield from lines
    yield "```"


def _heading(setting: Setting, arguments: list[str]) -> Iterator[str]:
    yield "# Dry run on a simulated accelerator: no figure means anything" if setting.is_dry else "# Measured on a GPU"
    yield ""
    yield f"`{shlex.join(['python', 'benchmarks/bench_gpu.py', *arguments])}`"
    yield ""
    if setting.device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            yield f"- cuda:{index}: {found.name}, {format_size(found.total_memory)}"
        yield f"- CUDA {torch.version.cuda}"
    yield from (f"- {name}: {value}" for name, value in machine().items())
    versions = [f"{name} {installed_version(name) or 'not installed'}" for name in ("bigload", "torch", *PEERS)]
    yield f"- {', '.join(versions)}"


def run(setting: Setting, wanted: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the lines of all parts, and whether each is one of a failure."""
    for name in wanted:
        part = PARTS[name]
        yield f"\n## {name}\n", False
        yield f"{(part.__doc__ or '').strip()}\n", False
        began = time.monotonic()
        try:
            for line in part(setting):
                yield line, False
        except PartSkippedError as error:
            yield f"Not run: {error}.", False
            continue
        except Exception as error:
            yield f"FAILED: {type(error).__name__}: {error}", True
        yield f"\n{time.monotonic() - began:.0f} s.", False


def main() -> int:
    """Run the parts, write the document, and return 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "sim"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, help="default: benchmarks/gpu.md; of a dry run bench/gpu-sim.md")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank_of:
        run_rank(asked.rank_of, asked.model)
        return 0
    if asked.device == "sim":
        import_module("simulated_accelerator").install()
    elif not torch.cuda.is_available():
        print("bench_gpu: torch sees no CUDA device here; --device sim is a dry run", file=sys.stderr)
        return 1
    makers = import_module("make")
    recipe = makers.load_recipe("tiny-llama" if asked.device == "sim" else "llama-3gb")
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        makers.make(recipe, model, data="random")
        setting = Setting(torch.device(asked.device, 0), model, rounds=asked.rounds)
        # Figures that mean nothing must not take the place of measured ones.
        out = asked.out or (FOLDER.parent / "bench" / "gpu-sim.md" if asked.device == "sim" else FOLDER / "gpu.md")
        out.parent.mkdir(exist_ok=True)
        with out.open("w", encoding="utf-8") as document:
            for line in _heading(setting, sys.argv[1:]):
                print(line, file=document)
            for line, is_failure in run(setting, asked.only):
                has_failed |= is_failure
                print(line, flush=True)
                print(line, file=document, flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
