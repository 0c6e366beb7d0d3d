import errno
import json
import os
import pickle
import threading
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load as parsed
from safetensors.torch import save_file

import bigload
from bigload.dtypes import DTYPES
from bigload.errors import (
    LegacyPickleError,
    NotEnoughMemoryError,
    OptionError,
    ReadError,
    UnknownTensorError,
    UnsupportedDTypeError,
)
from bigload.loading.tensors.views import torch_dtype
from bigload.machine.files.page_cache import cached_bytes, evict
from bigload.runtime.offload.stored_weights import MappedFiles
from bigload.units import MIB
from builders import DTYPE_BITS, make_checkpoint, open_descriptors, write_raw, write_shard

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint(folder, **form):
    """Write a tiny llama whose tensors begin where torch can use them, as save_pretrained does."""
    for path in make_checkpoint(folder, **form).glob("*.safetensors"):
        save_file(parsed(path.read_bytes()), path)
    return folder


@pytest.fixture
def folder(tmp_path):
    return checkpoint(tmp_path / "llama", shards=3)


def maps(folder):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def anonymous_bytes():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def same(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor.dtype, tensor.shape) == (second[name].dtype, second[name].shape), name
        assert torch.equal(*(each.reshape(-1).view(torch.uint8) for each in (tensor, second[name]))), name


def test_all_weights_of_a_checkpoint_are_there(folder):
    stored = bigload.StoredWeights(folder)
    expected = dict(bigload.load(folder))
    assert list(stored) == list(expected)
    assert len(stored) == len(expected)
    same(dict(stored), expected)
    same(dict(bigload.StoredWeights(bigload.open_checkpoint(folder), populate=False)), expected)


def test_all_dtypes_of_safetensors_that_torch_has_are_there(tmp_path):
    forms = {name: (name, [2, 4]) for name in DTYPE_BITS if torch_dtype(DTYPES[name]) is not None}
    write_shard(tmp_path / "model.safetensors", forms)
    same(dict(bigload.StoredWeights(tmp_path)), dict(bigload.load(tmp_path)))
    write_shard(tmp_path / "model.safetensors", {"w": ("F6_E2M3", [4])})
    with pytest.raises(UnsupportedDTypeError, match="F6_E2M3"):
        bigload.StoredWeights(tmp_path)


def test_tensors_at_odd_places_of_a_file_are_there(tmp_path):
    header = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    header["b"] = {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]}
    write_raw(tmp_path / "model.safetensors", header, bytes(range(3)) + torch.ones(2).double().numpy().tobytes())
    assert torch.equal(bigload.StoredWeights(tmp_path)["b"], torch.ones(2, dtype=torch.float64))


def test_scalars_and_tensors_without_elements_are_there(tmp_path):
    state = {"s": torch.tensor(2.5), "e": torch.empty(0, 3), "w": torch.ones(2)}
    save_file(state, tmp_path / "model.safetensors")
    same(dict(bigload.StoredWeights(tmp_path)), state)


def test_a_torch_file_is_read_where_it_is_with_its_views_and_ties(tmp_path):
    shared = torch.randn(3, 4)
    state = {"a": shared, "b": shared, "turned": shared.T, "part": shared[:, 1:3]}
    torch.save(state, tmp_path / "pytorch_model.bin")
    stored = bigload.StoredWeights(tmp_path)
    same(dict(stored), state)
    assert stored["a"].data_ptr() == stored["b"].data_ptr()


def test_an_offload_folder_of_accelerate_is_read_where_it_is(tmp_path):
    state = {"a": torch.randn(3), "b": torch.ones(2, dtype=torch.bfloat16), "s": torch.tensor(True)}
    bigload.offload_state_dict(tmp_path, state)
    same(dict(bigload.StoredWeights(tmp_path)), state)


def test_a_folder_of_blocks_has_its_tied_names(tmp_path, folder):
    tied = make_checkpoint(tmp_path / "tied", tied=True, shards=1)
    bigload.reshard(tied, out=tmp_path / "out", layout="offload")
    stored = bigload.StoredWeights(tmp_path / "out")
    assert stored[HEAD].data_ptr() == stored[EMBED].data_ptr()


def test_names_that_a_config_ties_are_there(tmp_path):
    stored = bigload.StoredWeights(checkpoint(tmp_path / "tied", tied=True, shards=1))
    assert HEAD in stored
    assert stored[HEAD].data_ptr() == stored[EMBED].data_ptr()


def test_names_that_the_metadata_of_a_file_ties_are_there(tmp_path):
    """As save_model of safetensors writes them."""
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors", metadata={"b": "a", "format": "pt", "c": "lost"})
    stored = bigload.StoredWeights(tmp_path)
    assert list(stored) == ["a", "b"]
    assert torch.equal(stored["b"], stored["a"])


def test_an_index_of_offloaded_weights_may_name_safetensors_beside_it(tmp_path):
    save_file({"inner": torch.ones(2)}, tmp_path / "block.safetensors")
    entry = {"safetensors_file": "block.safetensors", "weight_name": "inner"}
    (tmp_path / "index.json").write_text(json.dumps({"w": entry}))
    assert torch.equal(bigload.StoredWeights(tmp_path)["w"], torch.ones(2))


def test_names_that_the_caller_ties_are_there(folder):
    stored = bigload.StoredWeights(folder, aliases={"twin": EMBED})
    assert torch.equal(stored["twin"], stored[EMBED])
    assert "twin" in list(stored)
    assert torch.equal(bigload.StoredWeights(folder, aliases={HEAD: EMBED})[HEAD], stored[EMBED])
    assert not torch.equal(stored[HEAD], stored[EMBED])
    with pytest.raises(UnknownTensorError, match="nothing"):
        bigload.StoredWeights(folder, aliases={"twin": "nothing"})


def test_floats_are_cast_and_nothing_else(tmp_path):
    state = {"w": torch.randn(5), "ids": torch.arange(3), "q": torch.ones(2).to(torch.float8_e4m3fn)}
    save_file(state, tmp_path / "model.safetensors")
    stored = bigload.StoredWeights(tmp_path, dtype="bf16")
    same(dict(stored), dict(bigload.load(tmp_path, dtype="bf16")))
    assert stored.info("w").dtype.name == "F32"
    with pytest.raises(OptionError, match="int8"):
        bigload.StoredWeights(tmp_path, dtype=torch.int8)


def test_weights_go_to_the_device_asked_for(folder):
    assert bigload.StoredWeights(folder, device="meta")[EMBED].is_meta


def test_a_name_that_is_not_there_is_a_key_error(folder):
    stored = bigload.StoredWeights(folder)
    assert stored.get("nothing") is None
    assert "nothing" not in stored
    for ask in (stored.__getitem__, stored.info):
        with pytest.raises(UnknownTensorError, match="nothing"):
            ask("nothing")


def test_a_file_is_mapped_once_and_none_stays_open(folder):
    before = open_descriptors()
    stored = bigload.StoredWeights(folder)
    assert not maps(folder)
    tensors = [dict(stored) for _ in range(3)]
    assert len(maps(folder)) == 3
    assert open_descriptors() == before
    assert tensors[0][EMBED].data_ptr() == tensors[1][EMBED].data_ptr()
    stored.close()
    assert len(maps(folder)) == 3
    values = tensors[0][EMBED].clone()
    assert torch.equal(tensors[2][EMBED], values)
    del tensors
    assert not maps(folder)
    with pytest.raises(ValueError, match="closed"):
        stored[EMBED]


@pytest.mark.parametrize("cached", ["header", "all"])
def test_a_header_that_is_cached_alone_is_dropped_so_that_huge_pages_can_begin_there(folder, cached):
    path = min(folder.glob("*.safetensors"))
    with path.open("ab") as file:
        file.truncate(4 * MIB)
    if evict([path]) or cached_bytes(path) is None:
        pytest.skip("this file system keeps its pages, or does not say which it has")
    populate_cache(path, 4096 if cached == "header" else 4 * MIB)
    MappedFiles().map(path)
    assert cached_bytes(path, [(0, 4096)]) == (0 if cached == "header" else 4096)


def populate_cache(path, num_bytes):
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no more than that
        file.read(num_bytes)


def test_a_context_lets_go_of_the_files(folder):
    with bigload.StoredWeights(folder) as stored:
        stored[EMBED]
    assert not maps(folder)


def test_writing_to_a_weight_does_not_change_the_file(folder):
    before = {path: path.read_bytes() for path in folder.iterdir()}
    for tensor in bigload.StoredWeights(folder).values():
        tensor.zero_()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("when", ["before the first weight", "after it"])
@pytest.mark.parametrize("how", ["written to", "replaced", "cut off", "removed"])
def test_a_file_that_changed_is_noticed(tmp_path, when, how):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4)}, path)
    stored = bigload.StoredWeights(tmp_path)
    if when == "after it":
        stored["w"]
    content = path.read_bytes()
    if how == "replaced":
        (tmp_path / "new").write_bytes(content)
        (tmp_path / "new").replace(path)
    elif how == "removed":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if how == "cut off" else content[:-1] + b"\1")
    with pytest.raises(ReadError, match=r"model\.safetensors"):
        stored["w"]


def test_a_checkpoint_that_is_no_longer_the_one_that_was_opened_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4), "x": torch.ones(2)}, path)
    opened = bigload.open_checkpoint(tmp_path)
    save_file({"x": torch.ones(2), "w": torch.ones(4).half()}, path)
    with pytest.raises(ReadError, match="changed"):
        bigload.StoredWeights(opened)


def test_a_file_that_torch_alone_can_read_is_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(LegacyPickleError, match=r"torch before 1\.6"):
        bigload.StoredWeights(tmp_path)


def test_copies_and_pickles_open_the_files_anew(folder):
    stored = bigload.StoredWeights(folder, dtype="fp32", aliases={"twin": EMBED})
    stored[EMBED]
    pickled = pickle.dumps(stored)
    stored.close()
    for other in (deepcopy(stored), pickle.loads(pickled)):
        assert other["twin"].dtype == torch.float32
        assert list(other) == list(stored)


def test_threads_share_one_map_of_each_file(folder):
    stored, expected, found = bigload.StoredWeights(folder), dict(bigload.load(folder)), []
    gate = threading.Barrier(8)

    def read():
        gate.wait()
        found.append({name: stored[name] for name in expected})

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(maps(folder)) == 3
    for each in found:
        same(each, expected)


def test_maps_of_many_files_are_let_go_of(tmp_path, monkeypatch):
    monkeypatch.setattr("bigload.runtime.offload.stored_weights._MAX_MAPS", 5)
    state = {f"w{number}": torch.full((3,), float(number)) for number in range(12)}
    bigload.offload_state_dict(tmp_path, state)
    stored = bigload.StoredWeights(tmp_path)
    for _ in range(2):
        for name, expected in state.items():
            assert torch.equal(stored[name], expected)
        assert len(maps(tmp_path)) == 5


def test_nothing_is_written_and_little_is_held(tmp_path):
    """A checkpoint of 64 MiB, all of it asked for: pages of the file, no memory of this process."""
    save_file({f"w{number}": torch.ones(4 << 20) for number in range(4)}, tmp_path / "model.safetensors")
    stored = bigload.StoredWeights(tmp_path)

    before = anonymous_bytes()
    held = [stored[name] for name in stored]
    assert all(tensor.sum() == tensor.numel() for tensor in held)
    assert anonymous_bytes() - before < 8 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("reason", "error"), [(errno.EIO, ReadError), (errno.EFAULT, ReadError), (errno.ENOMEM, NotEnoughMemoryError)]
)
def test_what_a_disk_does_not_give_is_told(folder, monkeypatch, reason, error):
    monkeypatch.setattr("bigload.runtime.offload.stored_weights.populate_pages", lambda *_: reason)
    with pytest.raises(error, match="safetensors"):
        bigload.StoredWeights(folder)[EMBED]


def test_the_end_of_a_file_that_was_cut_off_while_in_use_is_an_error_and_not_the_end_of_the_process(tmp_path):
    """The system is asked for the pages before they are touched."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(4 << 20)}, path)
    files = MappedFiles()
    info = bigload.open_checkpoint(tmp_path).tensors["w"]
    files.tensor(path, info, populate=False)
    with path.open("r+b") as file:
        file.truncate(8192)
    cut = path.stat()
    (key,) = files._maps
    files._maps[key] = files._maps[key]._replace(signature=(cut.st_ino, cut.st_size, cut.st_mtime_ns))
    with pytest.raises(ReadError, match="did not give all of w"):
        files.tensor(path, info)
