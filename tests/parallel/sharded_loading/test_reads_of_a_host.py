"""Bytes that several ranks of a host need are read once, through the page cache; others past it."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bigload.loading.readers.direct import direct_alignment
from bigload.loading.strategy import io_method
from bigload.machine.files.page_cache import cached_bytes
from bigload.parallel.sharded_loading.load_sharded import load_sharded
from bigload.planning.tensor_parallel.division import Division
from bigload.units import MIB
from rank_processes import run_ranks

NUM_ROWS, NUM_BYTES = 4096, 16 * MIB


def with_rows_held_twice(kind, size):
    """Return a model of which ranks hold the same rows, and the divisions that say so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = nn.Linear(1024, NUM_ROWS, bias=False, device="meta")
    if kind == "overlapping":
        cut = NUM_ROWS // 4
        model = nn.Linear(1024, 3 * cut, bias=False, device="meta")
        return model, {"weight": Division(0, (((0, 3 * cut),), ((cut, NUM_ROWS),)))}
    if kind != "whole":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "part"))
        mesh, placements = (mesh, [Replicate(), Shard(0)]) if kind == "replicated" else (mesh["part"], [Shard(0)])
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, placements, src_data_rank=None))
    return model, {}


def read_cold(folder, kind, num_hosts):
    """Load by direct reads, if the ranks choose them; return bytes from the disk, and those in the page cache then."""
    io_method.MIN_DIRECT_BYTES = io_method.MIN_DIRECT_PART_BYTES = 0
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_RANK": str(rank % (size // num_hosts)), "GROUP_RANK": str(rank // (size // num_hosts))}
    model, divisions = with_rows_held_twice(kind, size)
    before = _bytes_from_disk()
    reports = load_sharded(model, folder, divisions=divisions)
    from_disk = _bytes_from_disk() - before
    return [str(reports[rank].method), from_disk, cached_bytes(Path(folder, "model.safetensors"), [(0, NUM_BYTES)])]


def _bytes_from_disk():
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


@pytest.fixture
def cold(tmp_path):
    """Return a folder with a checkpoint that the page cache has nothing of."""
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.rand(NUM_ROWS, 1024)}, file)
    if direct_alignment(file) is None:
        pytest.skip("the file system offers no direct reads")
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return tmp_path


FOUR_RANKS = [pytest.param(4, kind, marks=pytest.mark.slow) for kind in ("replicated", "on meshes of their own")]


@pytest.mark.parametrize(("size", "kind"), [(2, "whole"), (2, "overlapping"), *FOUR_RANKS])
def test_what_several_ranks_of_a_host_need_is_read_once(cold, size, kind):
    ranks = run_ranks(size, read_cold, str(cold), kind, 1)
    assert "direct" in [method for method, *_ in ranks], "the choice of the first, for what it has for itself"
    assert NUM_BYTES <= sum(from_disk for _, from_disk, _ in ranks) < 1.25 * NUM_BYTES


@pytest.mark.parametrize(("size", "kind"), [(2, "whole"), *FOUR_RANKS])
def test_what_another_host_needs_as_well_is_read_past_the_page_cache(cold, size, kind):
    ranks = run_ranks(size, read_cold, str(cold), kind, 2)
    assert 2 * NUM_BYTES <= sum(from_disk for _, from_disk, _ in ranks) < 2.5 * NUM_BYTES
    assert max(cached for *_, cached in ranks) < NUM_BYTES / 8
