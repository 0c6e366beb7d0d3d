"""The layout of torch.distributed.checkpoint: torch loads it, into plain and divided models, and bigload does too."""

import json
import struct

import distributed_checkpoints as saved
import pytest
import torch
from safetensors.torch import load_file, save_file

import bigload
from bigload.errors import OptionError
from builders import write_shard
from rank_processes import run_ranks

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
    *((torch.float8_e8m0fnu,) if hasattr(torch, "float8_e8m0fnu") else ()),  # torch 2.6 has none
]


@pytest.fixture
def model_folder(tmp_path):
    save_file(
        {name: each.contiguous() for name, each in saved.model().state_dict().items()}, tmp_path / "m.safetensors"
    )
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize(("kind", "size"), [("fsdp", 2), pytest.param("tp", 2, marks=pytest.mark.slow)])
def test_ranks_load_it(tmp_path, model_folder, kind, size):
    bigload.reshard(model_folder, tmp_path / "out", layout="dcp")
    assert run_ranks(size, saved.load, kind, str(tmp_path / "out")) == [True] * size


def test_every_dtype_and_shape_is_as_it_was(tmp_path):
    state = {f"of.{dtype}": torch.arange(12).remainder(2).to(dtype).view(3, 4) for dtype in DTYPES}
    state |= {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "äöü": torch.arange(3)}
    save_file(state, tmp_path / "model.safetensors")
    bigload.reshard(tmp_path / "model.safetensors", tmp_path / "out", layout="dcp", max_shard_bytes=100)
    assert (tmp_path / "out" / "__0_3.distcp").is_file()
    found = {name: torch.empty_like(each) for name, each in state.items()}
    saved.load_alone(tmp_path / "out", found)
    again = dict(bigload.load(tmp_path / "out"))
    for name, each in state.items():
        for other in (found[name], again[name]):
            assert other.dtype == each.dtype
            assert other.shape == each.shape
            assert other.view(torch.uint8).equal(each.view(torch.uint8)) if each.dim() else other.equal(each)
    assert bigload.verify(tmp_path / "out").ok


def test_a_distributed_checkpoint_becomes_another_and_back(tmp_path):
    run_ranks(2, saved.save, "tp", str(tmp_path / "saved"))
    bigload.reshard(tmp_path / "saved", tmp_path / "whole", layout="dcp")
    bigload.reshard(tmp_path / "whole", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, each in saved.model().state_dict().items():
        assert found[name].equal(each)


def test_a_prefix_puts_the_model_below_a_key(tmp_path, model_folder):
    bigload.reshard(model_folder, tmp_path / "out", layout="dcp", transforms=[bigload.AddPrefix("model.")])
    state = {"model": {name: torch.zeros_like(each) for name, each in saved.model().state_dict().items()}}
    saved.load_alone(tmp_path / "out", state)
    assert all(state["model"][name].equal(each) for name, each in saved.model().state_dict().items())


def test_an_interrupted_run_is_resumed(tmp_path, model_folder):
    bigload.reshard(model_folder, tmp_path / "out", layout="dcp", max_shard_bytes=400)
    whole = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def stop(_progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bigload.reshard(model_folder, tmp_path / "second", layout="dcp", max_shard_bytes=400, on_progress=stop)
    bigload.reshard(model_folder, tmp_path / "second", layout="dcp", max_shard_bytes=400, resume=True)
    for name, content in whole.items():
        if name.startswith("__") or name == ".metadata":
            assert (tmp_path / "second" / name).read_bytes() == content


def test_a_tensor_larger_than_4_gib_has_64_bit_headers(tmp_path):
    num_bytes = 2**32 + 10
    header = json.dumps({"big": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:  # one hole
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + num_bytes)
    bigload.reshard(tmp_path / "model.safetensors", tmp_path / "out", layout="dcp")
    path = tmp_path / "out" / "__0_0.distcp"
    assert path.stat().st_blocks * 512 < 2**20
    assert bigload.open_checkpoint(tmp_path / "out").tensors["big"].shape == (num_bytes,)
    assert torch.load(path, mmap=True).shape == (num_bytes,)


def test_a_dtype_that_torch_lacks_is_refused(tmp_path):
    write_shard(tmp_path / "model.safetensors", {"a": ("F6_E2M3", [4])})
    with pytest.raises(OptionError, match="torch has no dtype for F6_E2M3, of a"):
        bigload.reshard(tmp_path / "model.safetensors", tmp_path / "out", layout="dcp")
