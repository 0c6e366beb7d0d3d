import json
import pickle
from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError, OptionError, ReadError, WriteError
from bigload.runtime.offload import offload_functions
from bigload.runtime.offload.offload_writer import offload_writer

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOAT8 += [torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []  # torch 2.6 has none
WHOLE = [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool]


def values(dtype, *shape):
    if dtype in FLOAT8:
        return torch.rand(shape).add(0.5).to(dtype)
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def same(first, second):
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(bits(first), bits(second))


@pytest.mark.parametrize("shape", [(3, 2), (), (0, 4), (1,)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS + FLOAT8 + WHOLE, ids=str)
@pytest.mark.sample(24)
def test_a_weight_comes_back_bit_by_bit(tmp_path, dtype, shape):
    weight = values(dtype, *shape)
    index = bigload.offload_weight(weight, "w", tmp_path, {})
    assert index == {"w": {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)}}
    assert (tmp_path / "w.dat").stat().st_size == max(weight.nbytes, 1)
    assert same(bigload.load_offloaded_weight(tmp_path / "w.dat", index["w"]), weight)
    bigload.save_offload_index(index, tmp_path)
    assert same(bigload.OffloadedWeightsLoader(save_folder=tmp_path)["w"], weight)


@pytest.mark.parametrize(
    "weight",
    [
        torch.arange(12.0).reshape(3, 4).T,
        torch.arange(12)[::3],
        torch.ones(1).expand(3),
        torch.tensor([1 + 2j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "strided", "expanded", "conjugated", "negated", "trained"],
)
def test_values_are_written_row_by_row_whatever_the_view(tmp_path, weight):
    index = bigload.offload_weight(weight, "w", tmp_path, {})
    assert torch.equal(bigload.load_offloaded_weight(tmp_path / "w.dat", index["w"]), weight)


def test_without_an_index_there_is_none(tmp_path):
    assert bigload.offload_weight(torch.ones(2), "w", tmp_path) is None


@pytest.mark.parametrize("name", ["../w", "a/b", "/etc/w", "w\0", "\ud800", "w" * 252], ids=repr)
def test_a_name_that_is_no_file_is_refused(tmp_path, name):
    with pytest.raises(OptionError, match="cannot be the name of a file"):
        bigload.offload_weight(torch.ones(2), name, tmp_path)
    assert not list(tmp_path.iterdir())


class Wrapper(torch.Tensor):
    """A tensor around others, as quantised weights of torchao are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return arguments[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, device="meta"),
        lambda: Wrapper(torch.ones(2)),
        lambda: torch._efficientzerotensor(2),
        lambda: torch.ones(2).to_sparse(),
        pytest.param(
            lambda: torch.ones(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            marks=pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype"),
        ),
    ],
    ids=["meta", "wrapper", "zeros", "sparse", "packed"],
)
def test_what_a_dat_file_cannot_hold_is_refused(tmp_path, make):
    weight = make()
    refused = bigload.AbsentWeightError if weight.is_meta else OptionError
    with pytest.raises(refused, match="w"):
        bigload.offload_weight(weight, "w", tmp_path)
    with pytest.raises(refused, match="w"):
        bigload.offload_state_dict(tmp_path, {"w": weight})


def test_a_weight_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "w.dat").mkdir()
    with pytest.raises(WriteError, match=r"w\.dat"):
        bigload.offload_weight(torch.ones(2), "w", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["w.dat"]


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "float32", "shape": [3]}, "8 bytes, float32 .3. has 12"),
        ({"dtype": "float32", "shape": [1]}, "8 bytes, float32 .1. has 4"),
        ({"dtype": "object", "shape": [2]}, "dtype 'object'"),
        ({"dtype": "__name__", "shape": [2]}, "dtype '__name__'"),
        ({"dtype": "float32", "shape": [-2]}, "shape a list"),
        ({"dtype": "float32", "shape": [1 << 62, 1 << 62]}, "shape a list"),
        ({"dtype": "float32", "shape": "2"}, "shape '2'"),
        ({}, "dtype None"),
    ],
    ids=str,
)
def test_an_entry_that_does_not_go_with_its_file_is_refused(tmp_path, entry, says):
    bigload.offload_weight(torch.ones(2), "w", tmp_path)
    with pytest.raises(InvalidCheckpointError, match=says):
        bigload.load_offloaded_weight(tmp_path / "w.dat", entry)
    with pytest.raises(InvalidCheckpointError, match=says):
        bigload.OffloadedWeightsLoader(save_folder=tmp_path, index={"w": entry})["w"]


def test_a_loaded_weight_needs_its_file_no_more(tmp_path):
    bigload.offload_weight(torch.ones(2), "w", tmp_path)
    loaded = bigload.load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float32", "shape": [2]})
    (tmp_path / "w.dat").write_bytes(b"")
    loaded += 1
    assert torch.equal(loaded, torch.full((2,), 2.0))


def test_an_index_is_added_to_the_one_that_is_there(tmp_path):
    first, second = {"a": {"dtype": "bool", "shape": []}}, {"b": {"dtype": "int8", "shape": [2]}}
    bigload.save_offload_index(first, tmp_path)
    bigload.save_offload_index(second, tmp_path)
    bigload.save_offload_index({}, tmp_path)
    bigload.save_offload_index(None, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == first | second


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "[" * 5000], ids=["list", "cut", "twice", "deep"])
def test_an_index_that_is_none_is_refused_and_kept(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    for act in (
        lambda: bigload.save_offload_index({"a": {}}, tmp_path),
        lambda: bigload.offload_state_dict(tmp_path, {"a": torch.ones(1)}),
        lambda: bigload.OffloadedWeightsLoader(save_folder=tmp_path),
    ):
        with pytest.raises(InvalidCheckpointError, match=r"index\.json"):
            act()
    assert (tmp_path / "index.json").read_text() == text


def test_a_loader_takes_what_is_in_memory_before_what_is_on_disk(tmp_path):
    on_disk = {"a": torch.ones(2), "b": torch.zeros(2)}
    bigload.offload_state_dict(tmp_path, on_disk)
    mine = torch.full((2,), 3.0)
    loader = bigload.OffloadedWeightsLoader(state_dict={"c": mine, "a": mine}, save_folder=tmp_path)
    assert list(loader) == loader.all_keys == ["c", "a", "b"]
    assert len(loader) == 3
    assert loader["a"] is mine
    assert torch.equal(loader["b"], on_disk["b"])
    assert "b" in loader
    assert "d" not in loader
    assert loader.get("d") is None
    with pytest.raises(KeyError):
        loader["d"]


def test_a_loader_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="state_dict"):
        bigload.OffloadedWeightsLoader()
    with pytest.raises(CheckpointNotFoundError, match=r"index\.json"):
        bigload.OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(InvalidCheckpointError, match="neither"):
        bigload.OffloadedWeightsLoader(index={"w": {"dtype": "bool", "shape": []}})["w"]


@pytest.mark.parametrize("entry", [None, 3, ["float32"], "w"], ids=repr)
def test_entries_of_a_loader_that_are_none_are_refused(tmp_path, entry):
    with pytest.raises(InvalidCheckpointError, match="expected an object"):
        bigload.OffloadedWeightsLoader(save_folder=tmp_path, index={"w": entry})["w"]


def test_a_loader_reads_safetensors_where_they_are(tmp_path):
    save_file({"inner": torch.arange(4.0), "w": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "x.safetensors")
    file = str(tmp_path / "x.safetensors")
    loader = bigload.OffloadedWeightsLoader(
        index={
            "w": {"safetensors_file": file},
            "half": {"safetensors_file": file, "weight_name": "inner", "dtype": "float16"},
            "lost": {"safetensors_file": file},
            "odd": {"safetensors_file": file, "weight_name": "inner", "dtype": "load"},
        },
        device="cpu",
    )
    assert same(loader["w"], torch.ones(2, dtype=torch.bfloat16))
    assert same(loader["half"], torch.arange(4).half())
    for name in ("lost", "odd"):
        with pytest.raises(InvalidCheckpointError, match=r"no tensor|which is none"):
            loader[name]


def test_an_index_file_names_nothing_outside_its_folder(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    save_file({"w": torch.ones(2)}, folder / "y.safetensors")
    bigload.offload_weight(torch.ones(2), "secret", tmp_path)
    (folder / "linked.dat").symlink_to(tmp_path / "secret.dat")
    form = {"dtype": "float32", "shape": [2]}
    index = {"../secret": form, "linked": form, str(tmp_path / "secret"): form}
    index |= {"up": {"safetensors_file": "../x.safetensors", "weight_name": "w"}}
    index |= {"away": {"safetensors_file": str(tmp_path / "x.safetensors"), "weight_name": "w"}}
    index |= {"inside": {"safetensors_file": "y.safetensors", "weight_name": "w", "dtype": "float16"}}
    (folder / "index.json").write_text(json.dumps(index))
    loader = bigload.OffloadedWeightsLoader(save_folder=folder)
    assert loader["inside"].dtype == torch.float16
    for name in set(index) - {"inside"}:
        with pytest.raises(InvalidCheckpointError, match=r"absolute|leaves|no file in this folder"):
            loader[name]


def test_a_file_that_was_written_to_is_noticed(tmp_path):
    bigload.offload_state_dict(tmp_path, {"a": torch.ones(4)})
    loader = bigload.OffloadedWeightsLoader(save_folder=tmp_path)
    assert torch.equal(loader["a"], torch.ones(4))
    with (tmp_path / "a.dat").open("r+b") as file:
        file.truncate(3)
    with pytest.raises(ReadError, match=r"a\.dat"):
        loader["a"]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_loader_never_gives_weights_that_came_into_its_folder_later(tmp_path, is_used):
    """Two models that are offloaded to one folder: the first one would compute with weights of the second."""
    bigload.offload_state_dict(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)})
    loader = bigload.OffloadedWeightsLoader(save_folder=tmp_path)
    if is_used:
        loader["a"]
    bigload.offload_state_dict(tmp_path, {"a": torch.zeros(4), "c": torch.zeros(4)})
    for other in (loader, deepcopy(loader)):
        with pytest.raises(ReadError, match="changed"):
            other["a"]
        assert torch.equal(other["b"], torch.ones(4))


def test_a_loader_survives_copies_and_pickles(tmp_path):
    bigload.offload_state_dict(tmp_path, {"a": torch.arange(4)})
    loader = bigload.OffloadedWeightsLoader(state_dict={"b": torch.ones(2)}, save_folder=tmp_path)
    for other in (deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert torch.equal(other["a"], loader["a"])
        assert torch.equal(other["b"], loader["b"])


@pytest.mark.parametrize("kind", ["dat", "safetensors"])
def test_a_loader_of_relative_paths_reads_the_same_files_wherever_the_process_goes(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    if kind == "dat":
        bigload.offload_state_dict("weights", {"a": torch.ones(2)})
        loader = bigload.OffloadedWeightsLoader(save_folder="weights")
    else:
        save_file({"a": torch.ones(2)}, "a.safetensors")
        loader = bigload.OffloadedWeightsLoader(index={"a": {"safetensors_file": "a.safetensors"}})
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert torch.equal(loader["a"], torch.ones(2))


@pytest.mark.parametrize("name", ["a\0", "\ud800"], ids=repr)
def test_what_cannot_be_the_name_of_a_file_is_refused_in_an_index(name):
    with pytest.raises(InvalidCheckpointError, match="cannot be the name of a file"):
        bigload.OffloadedWeightsLoader(index={"a": {"safetensors_file": name}})["a"]


def test_writing_to_a_weight_does_not_change_its_file(tmp_path):
    bigload.offload_state_dict(tmp_path, {"a": torch.ones(4)})
    before = (tmp_path / "a.dat").read_bytes()
    bigload.OffloadedWeightsLoader(save_folder=tmp_path)["a"].zero_()
    assert (tmp_path / "a.dat").read_bytes() == before


class Counted(dict):
    """A mapping that says how often a value was asked for."""

    asked = 0

    def __getitem__(self, key):
        self.asked += 1
        return super().__getitem__(key)


def test_a_prefixed_dataset_has_the_keys_that_it_takes():
    whole = Counted({"a.x": 1, "a.y": 2, "ab": 3, "b.x": 4})
    part = bigload.PrefixedDataset(whole, "a.")
    assert "x" in part
    assert "ab" not in part
    assert 3 not in part
    assert whole.asked == 0
    assert list(part) == ["x", "y"]
    assert len(part) == 2
    assert dict(part) == {"x": 1, "y": 2}
    assert (part.dataset, part.prefix) == (whole, "a.")
    with pytest.raises(KeyError):
        part["z"]


def test_submodules_are_told_by_whole_names():
    state = {"a.1": 0, "a.10": 1, "a.2": 2, "a.1.w": 3, "b": 4}
    assert bigload.extract_submodules_state_dict(state, ["a.1", "b"]) == {"a.1": 0, "a.1.w": 3, "b": 4}
    assert list(bigload.extract_submodules_state_dict(state, ["b", "a", "a.1"])) == ["b", "a.1", "a.10", "a.2", "a.1.w"]
    assert bigload.extract_submodules_state_dict(state, [""]) == state
    assert bigload.extract_submodules_state_dict(state, ["c"]) == {}


def test_the_weights_of_another_that_come_right_after_are_not_taken_for_those_that_were_offloaded(
    tmp_path, monkeypatch
):
    """Two models that are offloaded to one folder at once: each computes with its own weights, or is told."""
    given = []

    @contextmanager
    def noted(folder):
        with offload_writer(folder) as writer:
            yield writer
        if not given:
            given.append(writer)
            bigload.offload_state_dict(tmp_path, nn.Linear(2, 2).state_dict())

    monkeypatch.setattr(offload_functions, "offload_writer", noted)
    model = nn.Linear(2, 2)
    bigload.disk_offload(model, tmp_path, execution_device="cpu")
    with pytest.raises(ReadError, match="changed"):
        model(torch.ones(1, 2))
