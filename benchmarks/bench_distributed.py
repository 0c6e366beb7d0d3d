"""Measure how a distributed checkpoint becomes one folder of safetensors, by bigload and by torch, and print it.

    python benchmarks/bench_distributed.py [--gib 4] [--rounds 3] [--folder FOLDER]

Two ranks save tensors of 64 MiB, half of them divided by rows, half by columns, and an optimizer's state of the same
size for every fourth. Torch's way is `dcp_to_torch_save`, `torch.load` and safetensors' `save_file`, with an fsync, for
bigload's files are on the disk when it ends, read back and compared. Each run is a process of its own, in rotating
order, with the checkpoint in the page cache; the first round is not counted. Peaks are of the resident set, imports
included. Nothing here decides a test.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bigload.bench.page_cache_state import CacheState, prepare
from bigload.units import GIB, MIB
from harness import Goal, in_rounds

ROWS, COLUMNS = 4096, 8192
TENSOR_BYTES = 2 * ROWS * COLUMNS


def main() -> None:
    """Print the figures of both."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        make(Path(folder), num_tensors=max(round(arguments.gib * GIB / TENSOR_BYTES), 2))
        runs = in_rounds({name: partial(child, name, Path(folder)) for name in WAYS}, rounds=arguments.rounds)
    seconds, peaks = ({name: statistics.median(run[key] for run in runs[name]) for name in WAYS} for key in KEYS)
    for name in WAYS:
        shown = ", ".join(f"{run['seconds']:.2f}" for run in runs[name])
        print(f"{name:<17} {seconds[name]:7.2f} s ({shown}), peak {peaks[name] / MIB:7.0f} MiB")
    print(Goal(text="speed", value=seconds["torch_distributed"] / seconds["bigload"], bound=2))
    print(Goal(text="memory", value=peaks["bigload"] / peaks["torch_distributed"], bound=0.1, is_least=False))


WAYS, KEYS = ("bigload", "torch_distributed"), ("seconds", "peak_bytes")


def make(folder: Path, *, num_tensors: int) -> None:
    """Have two ranks save a model of `num_tensors` tensors to `folder/saved`."""
    torch.multiprocessing.spawn(_save, (str(folder), num_tensors), nprocs=2)


def _save(rank: int, folder: str, num_tensors: int) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    noise = torch.randn(ROWS, COLUMNS).bfloat16()
    model = {
        f"layers.{number}.weight": distribute_tensor(noise + number, mesh, [Shard(number % 2)])
        for number in range(num_tensors)
    }
    state = {name: {"exp_avg": tensor} for name, tensor in list(model.items())[::4]}
    dcp.save({"model": model, "optim": {"state": state}}, checkpoint_id=f"{folder}/saved")
    torch.distributed.destroy_process_group()


def child(way: str, folder: Path) -> dict[str, float]:
    """Run one way as a process of its own; see `reshard_contenders`."""
    prepare([*(folder / "saved").glob("*.distcp")], CacheState.WARM)
    keywords = json.dumps({"source": str(folder / "saved"), "out": str(folder / "out")})
    script = Path(__file__).with_name("reshard_contenders.py")
    done = subprocess.run([sys.executable, script, way, keywords], check=True, capture_output=True, text=True)
    shutil.rmtree(folder / "out")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
