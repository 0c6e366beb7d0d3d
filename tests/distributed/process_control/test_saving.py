import io
import os
import stat
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as from_bytes
from safetensors.torch import load_file

import bigload
from bigload.errors import OptionError, WriteError

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("safe", [False, True])
def test_what_is_saved_is_read_again(tmp_path, safe):
    bigload.save(STATE, tmp_path / "state", safe_serialization=safe)
    found = load_file(tmp_path / "state") if safe else torch.load(tmp_path / "state")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in STATE.items()
    }
    assert entries(tmp_path) == ["state"]


def test_anything_can_be_pickled_and_bigload_loads_safetensors(tmp_path):
    bigload.save([0, 1, {"x": None}], str(tmp_path / "list.pt"))
    assert torch.load(tmp_path / "list.pt") == [0, 1, {"x": None}]
    bigload.save(STATE, tmp_path / "model.safetensors", safe_serialization=True)
    assert torch.equal(bigload.load(tmp_path / "model.safetensors")["a"], STATE["a"])


@pytest.mark.parametrize(
    ("rank", "local_rank", "each_node", "writes"),
    [(0, 0, False, True), (1, 1, False, False), (2, 0, False, False), (2, 0, True, True), (3, 1, True, False)],
)
def test_one_process_writes(tmp_path, launched_by, rank, local_rank, each_node, writes):  # noqa: PLR0917
    launched_by(WORLD_SIZE=4, RANK=rank, LOCAL_RANK=local_rank)
    bigload.save(STATE, tmp_path / "state.pt", save_on_each_node=each_node)
    assert entries(tmp_path) == (["state.pt"] if writes else [])


@pytest.mark.parametrize("safe", [False, True])
def test_files_that_are_open_are_written_to(safe):
    file = io.BytesIO()
    bigload.save(STATE, file, safe_serialization=safe)
    found = from_bytes(file.getvalue()) if safe else torch.load(io.BytesIO(file.getvalue()))
    assert torch.equal(found["a"], STATE["a"])


def test_ties_are_written_once_and_views_each_by_itself(tmp_path, caplog):
    fused = torch.arange(12.0).reshape(6, 2)
    state = OrderedDict(q=fused[:3], k=fused[3:], tied=fused[:3], columns=fused[:, :1], empty=fused[:0])
    state["conjugate"] = torch.tensor([1 + 2j]).conj()
    bigload.save(state, tmp_path / "state", safe_serialization=True)
    found = load_file(tmp_path / "state")
    assert sorted(found) == ["columns", "conjugate", "empty", "k", "q"]
    for name, tensor in found.items():
        assert torch.equal(tensor, state[name]), name
    assert "tied is not written: it is the same tensor as q" in caplog.text


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        ([1], 'obj is "list"'),
        ({"a": 1}, 'obj is "a: int"'),
        ({1: torch.ones(1)}, "with the key 1"),
        ({"a": torch.ones(1, device="meta")}, "a: Tensor on the meta device"),
        ({"a": torch.eye(2).to_sparse()}, "with the layout torch.sparse_coo"),
    ],
)
def test_what_safetensors_cannot_hold_is_refused_and_the_older_file_stays(tmp_path, obj, text):
    (tmp_path / "state").write_text("older")
    with pytest.raises(OptionError, match=text):
        bigload.save(obj, tmp_path / "state", safe_serialization=True)
    assert (tmp_path / "state").read_text() == "older"
    assert entries(tmp_path) == ["state"]


class Broken:
    def __reduce__(self):
        raise KeyboardInterrupt


def test_an_interrupted_save_leaves_the_older_file_and_nothing_else(tmp_path):
    bigload.save(STATE, tmp_path / "state.pt")
    with pytest.raises(KeyboardInterrupt):
        bigload.save([torch.ones(1000), Broken()], tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt").keys() == STATE.keys()
    assert entries(tmp_path) == ["state.pt"]


TOO_LARGE = """
import resource, signal, sys, torch, bigload
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    bigload.save({"a": torch.ones(10_000)}, sys.argv[1], safe_serialization=sys.argv[2] == "safe")
except bigload.WriteError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safe", "pickle"])
def test_a_disk_that_refuses_leaves_the_older_file_and_nothing_else(tmp_path, form):
    (tmp_path / "state").write_text("older")
    done = subprocess.run(
        [sys.executable, "-c", TOO_LARGE, tmp_path / "state", form], capture_output=True, text=True, check=False
    )
    assert f"cannot write {tmp_path / 'state'}" in done.stdout, done.stderr
    assert done.returncode == 0
    assert (tmp_path / "state").read_text() == "older"
    assert entries(tmp_path) == ["state"]


@pytest.mark.parametrize("safe", [False, True])
def test_a_folder_that_is_not_there_or_in_the_way_is_told(tmp_path, safe):
    with pytest.raises(WriteError, match="No such file or directory"):
        bigload.save(STATE, tmp_path / "missing" / "state", safe_serialization=safe)
    with pytest.raises(WriteError, match="Is a directory"):
        bigload.save(STATE, tmp_path, safe_serialization=safe)


def test_links_are_followed_modes_are_kept_and_devices_stay_devices(tmp_path):
    (tmp_path / "real").write_text("older")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    bigload.save(STATE, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640
    assert torch.load(tmp_path / "real").keys() == STATE.keys()
    umask = os.umask(0o027)
    try:
        bigload.save(STATE, tmp_path / "new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    bigload.save(STATE, "/dev/null", safe_serialization=True)
    assert Path("/dev/null").is_char_device()
