"""Folders in which each rank of a training saved its part: joined, read by any number of ranks, refused if they lie."""

import json
import struct

import pytest
import torch
from torch import nn

from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError
from bigload.parallel.sharded_loading.load_sharded import load_parts, load_sharded
from bigload.parallel.sharded_loading.stored_tensors import open_stored
from bigload.planning.tensor_parallel.division import Division
from builders import write_shard
from rank_processes import run_ranks

WHOLE = torch.arange(15.0).view(5, 3)


def write_part(folder, number, offsets, forms):
    told = {name: {"saved_offsets": start} for name, start in offsets.items()}
    path = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
    return write_shard(path, forms, metadata={"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0"})


def test_parts_are_joined_and_cut_anew(tmp_path):
    for number, (start, stop) in enumerate([(0, 3), (3, 5)], 1):
        path = write_part(tmp_path, number, {"a": [start, 0]}, {"a": ("F32", [stop - start, 3])})
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        path.write_bytes(raw[: 8 + length] + bytes(WHOLE[start:stop].contiguous().view(torch.uint8).flatten().tolist()))
    write_part(tmp_path, 3, {"a": [5, 0], "n": []}, {"a": ("F32", [0, 3]), "n": ("I64", [])})
    stored = open_stored(tmp_path)
    assert {name: tensor.shape for name, tensor in stored.tensors.items()} == {"a": (5, 3), "n": ()}
    for division, expected in [
        (Division(), WHOLE),
        (Division(0, (((2, 4),),)), WHOLE[2:4]),
        (Division(1, (((1, 2),),)), WHOLE[:, 1:2]),
    ]:
        found = load_parts(tmp_path, {"a": division}, 0)
        assert found["a"].equal(expected)
    assert found.report.needed_bytes == 20


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([([0, 0], [3, 3]), ([2, 0], [2, 3])], "its parts have 15 elements, [4, 3] has 12"),
        ([([0, 0], [2, 3]), ([4, 0], [1, 3])], "its parts have 9 elements, [5, 3] has 15"),
        ([([0, 0], [2, 3]), ([0, 0], [2, 3]), ([4, 0], [2, 3])], "two parts hold the same elements"),
        ([([0, 0], [2, 2]), ([1, 0], [1, 4]), ([0, 1], [2, 2])], "its parts have 12 elements, [2, 4] has 8"),
        ([([0, 0], [2, 3]), ([0], [2, 3])], "DCP_SHARDING_INFO has [0] for tensor 'a' of shape [2, 3]"),
        ([([0, -1], [2, 3])], "DCP_SHARDING_INFO has [0, -1] for tensor 'a'"),
        ([([0, 2**62], [1, 1])], f"[1, {2**62 + 1}] has {2**62 + 1}"),
        ([(None, [2, 3])], "DCP_SHARDING_INFO has None for tensor 'a'"),
    ],
)
def test_parts_that_do_not_make_a_tensor_are_refused(tmp_path, parts, said):
    for number, (start, shape) in enumerate(parts, 1):
        write_part(tmp_path, number, {"a": start}, {"a": ("F32", shape)})
    with pytest.raises(InvalidCheckpointError) as caught:
        open_stored(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("told", [None, "nonsense", "[]", "[" * 100_000])
def test_a_part_that_does_not_say_where_it_belongs_is_refused(tmp_path, told):
    metadata = {} if told is None else {"DCP_SHARDING_INFO": told}
    write_shard(tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"a": ("F32", [2])}, metadata=metadata)
    with pytest.raises(InvalidCheckpointError, match="DCP_SHARDING_INFO"):
        open_stored(tmp_path)


def test_a_folder_of_nothing_is_what_it_always_was(tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        open_stored(tmp_path)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 1)
        self.register_buffer("scale", torch.ones(()))


def filled():
    generator = torch.Generator().manual_seed(3)
    model = Model()
    for tensor in model.state_dict().values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    return model


def save_by_torch(folder):
    """Save what was loaded, by all ranks: in parts, and in parts that are put together."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        rows, columns = Model(), Model()
    fully_shard(rows)
    parallelize_module(columns, mesh["tp"], {"first": ColwiseParallel(), "last": RowwiseParallel()})
    for name, model in (("rows", rows), ("columns", columns)):
        load_sharded(model, f"{folder}/source")
        parts = HuggingFaceStorageWriter(f"{folder}/{name}", save_distributed=True)
        dcp.save(model.state_dict(), storage_writer=parts)
        together = HuggingFaceStorageWriter(f"{folder}/{name}-1", save_distributed=True, enable_consolidation=True)
        dcp.save(model.state_dict(), storage_writer=together)


def load_again(folder):
    """Load all that was saved, divided otherwise; return what differs."""
    from torch.distributed.fsdp import fully_shard

    expected = filled().state_dict()
    wrong = []
    for name in ("rows", "columns", "rows-1", "rows-1/sharded", "columns-1"):
        with torch.device("meta"):
            model = fully_shard(Model())
        load_sharded(model, f"{folder}/{name}")
        found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        whole = {key: each.full_tensor() if hasattr(each, "full_tensor") else each for key, each in found.items()}
        lost = {"scale"} if name.endswith("-1") else set()  # torch 2.13 writes 0 for single numbers it puts together
        wrong += [f"{name}: {key}" for key, each in whole.items() if key not in lost and not each.equal(expected[key])]
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(("savers", "loaders"), [(2, 3), (4, 2)])
def test_torch_saves_what_was_loaded_and_other_ranks_load_it(tmp_path, savers, loaders):
    from safetensors.torch import save_file

    (tmp_path / "source").mkdir()
    save_file(filled().state_dict(), tmp_path / "source" / "model.safetensors")
    assert run_ranks(savers, save_by_torch, tmp_path) == [None] * savers
    assert run_ranks(loaders, load_again, tmp_path) == [[]] * loaders
    alone = Model()
    load_sharded(alone, tmp_path / "columns")
    assert all(each.equal(filled().state_dict()[name]) for name, each in alone.state_dict().items())
