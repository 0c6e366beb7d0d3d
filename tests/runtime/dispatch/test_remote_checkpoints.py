"""Every way into a module takes a checkpoint of the Hub or of a web server as it takes a folder."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bigload
from bigload.checkpoint.byte_source import WholeFilesWarning
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import OptionError, ReadError
from hub_server import served_hub
from rank_processes import run_ranks

ROWS, WIDTH = 64, 2048
HEADER_BYTES = 64 << 10  # asked for at a guess; those of web servers are not kept


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(ROWS, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


def on_meta():
    with torch.device("meta"):
        return Model()


STATE = {name: torch.rand(value.shape) for name, value in Model().state_dict().items()}


@pytest.fixture
def served(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    save_file(STATE, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text("{}")
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        server.add("org/tiny", tmp_path / "model")
        yield server


@pytest.fixture(params=["org/tiny", "hf://org/tiny@main", "http"])
def remote(request, served, tmp_path):
    return request.param if request.param != "http" else served.serve("files", tmp_path / "model")


@pytest.fixture
def without_ranges(served, tmp_path):
    served.fault("plain", no_ranges=True, times=-1)
    return served.serve("files", tmp_path / "model")


def assert_holds(model):
    found = model.state_dict()
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def loaded(remote):
    model = on_meta()
    bigload.load(remote, into=model)
    return model


def dispatched(remote):
    return bigload.load_checkpoint_and_dispatch(on_meta(), remote, device_map={"": "cpu"})


def filled(remote):
    model = on_meta()
    bigload.load_checkpoint_in_model(model, remote, device_map={"": "cpu"})
    return model


def planned(remote):
    return bigload.load_and_dispatch(on_meta(), bigload.plan(remote, {"cpu": "1GiB"}))


def sharded(remote):
    model = on_meta()
    bigload.load_sharded(model, remote)
    return model


@pytest.mark.parametrize("load", [loaded, dispatched, filled, planned, sharded])
@pytest.mark.sample(4)
def test_a_module_is_filled_from_the_network(remote, load):
    assert_holds(load(remote))


@pytest.mark.parametrize("load", [loaded, dispatched, filled, planned, sharded])
@pytest.mark.filterwarnings("ignore::bigload.checkpoint.byte_source.WholeFilesWarning")
@pytest.mark.sample(2)
def test_a_module_is_filled_by_a_server_without_byte_ranges(without_ranges, load):
    assert_holds(load(without_ranges))


def test_a_load_from_a_server_without_byte_ranges_says_how_much_more_is_read(without_ranges):
    text = r"127\.0\.0\.1:\d+ does not support byte ranges: whole files are read \(1\.00 MiB for 512\.0 KiB needed\)"
    with pytest.warns(WholeFilesWarning, match=text):
        found = bigload.load(without_ranges, only=["down.weight"])
    assert torch.equal(found["down.weight"], STATE["down.weight"])


def test_parts_and_dtypes_are_loaded_from_the_network(remote):
    found = bigload.load(
        remote, only=["down.weight"], slices={"down.weight": bigload.Slice(1, 512, 1024)}, dtype="fp64"
    )
    assert torch.equal(found["down.weight"], STATE["down.weight"][:, 512:1024].double())


def test_weights_on_disk_are_not_read_over_the_network_for_each_forward(remote, served):
    device_map = {"up": "cpu", "down": "disk"}
    bigload.plan(remote, {"cpu": "1GiB"})
    served.requests.clear()
    with pytest.raises(OptionError, match="not on this machine") as caught:
        bigload.load_checkpoint_and_dispatch(on_meta(), remote, device_map=device_map)
    assert "bigload fetch" in caught.value.hint
    assert served.num_bytes < 4 * HEADER_BYTES  # no weights


def test_weights_on_disk_are_copied_to_the_folder_that_is_given(remote, tmp_path):
    device_map = {"up": "cpu", "down": "disk"}
    folder = tmp_path / "offload"
    model = bigload.load_checkpoint_and_dispatch(on_meta(), remote, device_map=device_map, offload_folder=folder)
    whole = Model()
    whole.load_state_dict(STATE)
    x = torch.rand(2, ROWS)
    assert torch.equal(model(x), whole(x))


def test_a_failed_load_leaves_the_module_as_it_was(remote, served):
    opened = open_checkpoint(remote)
    served.fault("plain" if remote.startswith("http") else "cdn", file=".safetensors", times=-1, cut_after=0)
    model = Model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ReadError, match="times in a row"):
        bigload.load(opened, into=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def load_a_half(remote):
    os.environ["HF_HUB_OFFLINE"] = "0"
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = False
    mesh = init_device_mesh("cpu", (2,))
    model = on_meta()
    model.up.weight = nn.Parameter(distribute_tensor(model.up.weight, mesh, [Shard(0)]))
    model.down.weight = nn.Parameter(distribute_tensor(model.down.weight, mesh, [Shard(1)]))
    bigload.load_sharded(model, remote)
    return [[float(value.full_tensor().double().sum())] for value in model.state_dict().values()]


def test_each_rank_reads_whole_files_where_there_are_no_byte_ranges(without_ranges):
    found = run_ranks(2, load_a_half, without_ranges)
    assert found == [[[float(value.double().sum())] for value in STATE.values()]] * 2


def test_each_rank_transfers_its_own_rows(served, tmp_path):
    remote = served.serve("files", tmp_path / "model")
    found = run_ranks(2, load_a_half, remote)
    assert found == [[[float(value.double().sum())] for value in STATE.values()]] * 2
    rows, columns = (value.nbytes for value in STATE.values())
    size = Path(tmp_path / "model/model.safetensors").stat().st_size
    assert size <= served.num_bytes + 1000
    assert served.num_bytes <= 2 * (rows // 2 + columns) + 8 * HEADER_BYTES  # columns come with what lies between
