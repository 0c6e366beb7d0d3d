"""Functions that run in several processes at once, as the ranks of a gloo group."""

import json
import tempfile
from pathlib import Path

import torch
from torch import distributed, multiprocessing


def run_ranks(job, size, *args):
    """Return what `job(rank, size, *args)` returns on each rank, as JSON has it; raise what one raises."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (size, folder, job, args), nprocs=size)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(size)]


def _rank(rank, size, folder, job, args):
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", size)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        found = job(rank, size, *args)
        Path(folder, f"{rank}.json").write_text(json.dumps(found))
        distributed.barrier()
    finally:
        distributed.destroy_process_group()
