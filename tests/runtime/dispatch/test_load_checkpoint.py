"""Checkpoints into modules, on the CPU and on disk; other devices are in `tests/simulated/test_checkpoints.py`."""

import copy
import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload import load_checkpoint_in_model, load_state_dict
from bigload.runtime.dispatch import module_filling
from bigload.runtime.dispatch.checkpoint_source import CheckpointSource


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.register_buffer("scratch", torch.full((2,), 7.0), persistent=False)


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


def state_of(model):
    """Random values for everything that a model saves."""
    generator = torch.Generator().manual_seed(1)
    made = {}
    for name, tensor in model.state_dict().items():
        values = torch.rand(tensor.shape, generator=generator)
        made[name] = values if tensor.is_floating_point() else torch.full_like(tensor, 5)
    return made


STATE = state_of(Model())


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "checkpoint", STATE)
    return tmp_path / "checkpoint"


def save(folder, state):
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def on_meta(kind=Model):
    with torch.device("meta"):
        return kind()


def assert_holds(model, expected=STATE):
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("make", [Model, on_meta])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"embed": "cpu", "norm": "cpu", "head.weight": "cpu"}])
def test_a_model_is_filled_in_memory_and_on_meta(folder, make, device_map):
    model = make()
    assert load_checkpoint_in_model(model, folder, device_map) == {}
    assert_holds(model)


def test_memory_that_a_model_has_is_filled_and_parameters_stay_the_same_objects(folder):
    model = Tied()
    before = model.embed.weight
    state = {name: tensor for name, tensor in STATE.items() if name != "head.weight"}
    save(folder.parent / "tied", state)
    load_checkpoint_in_model(model, folder.parent / "tied")
    assert model.embed.weight is before
    assert model.head.weight is before
    assert torch.equal(before, STATE["embed.weight"])
    assert model.scratch.tolist() == [7.0, 7.0]


@pytest.mark.parametrize("stored", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_tied_parameters_are_one_whichever_name_is_stored(folder, stored, device):
    state = {name: tensor for name, tensor in STATE.items() if name == stored or "weight" not in name}
    state |= {"norm.weight": STATE["norm.weight"]}
    save(folder.parent / "tied", state)
    model = on_meta(Tied)
    on_disk = load_checkpoint_in_model(model, folder.parent / "tied", {"": device}, strict=True)
    assert model.head.weight is model.embed.weight
    if device == "disk":
        assert on_disk["head.weight"].data_ptr() == on_disk["embed.weight"].data_ptr()
    else:
        assert torch.equal(model.head.weight, STATE[stored])


def test_a_file_an_index_and_torch_files_are_checkpoints_too(tmp_path):
    torch.save(STATE, tmp_path / "weights.pt")
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    files = {name: f"{name.split('.')[0]}.bin" for name in STATE}
    for file in set(files.values()):
        torch.save({name: STATE[name] for name in STATE if files[name] == file}, tmp_path / file)
    (tmp_path / "some.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "bare.index.json").write_text(json.dumps(files))
    for name in ("weights.pt", "old.bin", "some.index.json", "bare.index.json"):
        for make in (Model, on_meta):
            model = make()
            load_checkpoint_in_model(model, tmp_path / name, strict=True)
            assert_holds(model)


def test_an_index_of_any_name_is_found_where_it_is_the_only_one(tmp_path):
    torch.save(STATE, tmp_path / "all.bin")
    (tmp_path / "weight_map.index.json").write_text(json.dumps(dict.fromkeys(STATE, "all.bin")))
    model = Model()
    load_checkpoint_in_model(model, tmp_path)
    assert_holds(model)


def test_a_folder_with_both_formats_loads_safetensors(folder):
    torch.save({name: tensor + 1 for name, tensor in STATE.items()}, folder / "pytorch_model.bin")
    model = Model()
    load_checkpoint_in_model(model, folder)
    assert_holds(model)


def test_buffers_of_modules_on_disk_are_loaded(folder):
    model = on_meta()
    on_disk = load_checkpoint_in_model(model, folder, {"embed": "cpu", "norm": "disk", "head": "cpu"})
    assert torch.equal(model.norm.running_mean, STATE["norm.running_mean"])
    assert model.norm.weight.is_meta
    assert sorted(on_disk) == ["norm.bias", "norm.weight"]


def test_with_offload_buffers_they_stay_on_disk(folder):
    model = on_meta()
    on_disk = load_checkpoint_in_model(model, folder, {"": "disk"}, offload_buffers=True)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert {name: tensor.tolist() for name, tensor in on_disk.items()} == {
        name: t.tolist() for name, t in STATE.items()
    }


@pytest.mark.parametrize("make", [Model, on_meta])
def test_a_map_that_is_all_disk_works_and_writes_nothing(folder, make):
    before = sorted(folder.parent.rglob("*"))
    model = make()
    on_disk = load_checkpoint_in_model(model, folder, {"": "disk"})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(on_disk["head.weight"], STATE["head.weight"])
    assert sorted(folder.parent.rglob("*")) == before


def test_an_offload_folder_is_written_where_one_is_asked_for(folder, tmp_path):
    model = on_meta()
    on_disk = load_checkpoint_in_model(model, folder, {"": "disk"}, offload_folder=tmp_path / "offload")
    index = json.loads((tmp_path / "offload" / "index.json").read_text())
    assert index["head.weight"] == {"dtype": "float32", "shape": [8, 4]}
    assert sorted(index) == sorted(on_disk)
    assert torch.equal(on_disk["head.weight"], STATE["head.weight"])


@pytest.mark.parametrize("offloads", [False, True])
def test_dtype_applies_to_all_devices_and_to_what_is_on_disk(folder, tmp_path, offloads):
    model = on_meta()
    where = tmp_path / "offload" if offloads else None
    device_map = {"embed": "cpu", "norm": "disk", "head": "disk"}
    on_disk = load_checkpoint_in_model(model, folder, device_map, where, dtype=torch.float16)
    assert model.embed.weight.dtype == model.head.weight.dtype == on_disk["head.weight"].dtype == torch.float16
    assert model.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(on_disk["head.weight"], STATE["head.weight"].half())
    if offloads:
        assert (where / "head.weight.dat").stat().st_size == 8 * 4 * 2


def test_without_a_dtype_weights_get_that_of_the_model_in_memory_and_on_disk(folder):
    model = Model().to(torch.bfloat16)
    on_disk = load_checkpoint_in_model(model, folder, {"embed": "cpu", "norm": "cpu", "head": "disk"})
    assert torch.equal(model.embed.weight, STATE["embed.weight"].bfloat16())
    assert torch.equal(on_disk["head.weight"], STATE["head.weight"].bfloat16())


class Kinds(nn.Module):
    """What is stored in other kinds of dtypes, or under a name that scales of quantised weights have, too."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones((), dtype=torch.float16))
        self.mask = nn.Parameter(torch.ones(2))
        self.eighth = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(1))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex128))


@pytest.mark.parametrize("make", [Kinds, lambda: on_meta(Kinds)], ids=["in memory", "on meta"])
@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}], ids=str)
@pytest.mark.parametrize("offloads", [False, True])
def test_the_model_decides_on_dtypes_whatever_kind_they_are_stored_as(tmp_path, make, device_map, offloads):
    state = {
        "logit_scale": torch.tensor(2.0),
        "mask": torch.tensor([1, 0], dtype=torch.int32),
        "eighth": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
        "count": torch.tensor(7.0),
        "phase": torch.tensor([1j, 2.0], dtype=torch.complex64),
    }
    save(tmp_path / "checkpoint", state)
    model = make()
    before = dict(model.state_dict(keep_vars=True))
    folder = tmp_path / "offload" if offloads else None
    on_disk = load_checkpoint_in_model(model, tmp_path / "checkpoint", device_map, folder, offload_buffers=True)
    keeps_stored = device_map is None and before["count"].is_meta
    for name, tensor in {**model.state_dict(keep_vars=True), **on_disk}.items():
        expected = state[name] if keeps_stored else state[name].to(before[name].dtype)
        assert tensor.dtype == expected.dtype
        assert torch.equal(*(each.float() if each.itemsize == 1 else each for each in (tensor, expected)))
        assert device_map is not None or before[name].is_meta or tensor is before[name]


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_a_buffer_whose_elements_share_memory_gets_memory_of_its_own(tmp_path, device_map):
    save(tmp_path / "checkpoint", {"mask": torch.arange(4.0)})
    model = nn.Module()
    model.register_buffer("mask", torch.ones(1).expand(4))
    load_checkpoint_in_model(model, tmp_path / "checkpoint", device_map)
    assert torch.equal(model.mask, torch.arange(4.0))


def test_modules_are_kept_in_float32_where_the_rest_becomes_float16(folder):
    model = Model()
    load_checkpoint_in_model(model, folder, {"": "cpu"}, dtype="float16", keep_in_fp32_modules=["norm"])
    assert model.norm.weight.dtype == torch.float32
    assert model.head.weight.dtype == torch.float16


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
def test_missing_and_unexpected_keys_are_reported_and_refused_with_strict(tmp_path, caplog, device_map):
    state = {name: tensor for name, tensor in STATE.items() if name != "head.weight"} | {"more": torch.ones(2)}
    save(tmp_path / "other", state)
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(bigload.StateDictMismatchError) as error:
        load_checkpoint_in_model(model, tmp_path / "other", device_map, strict=True)
    assert (error.value.missing, error.value.unexpected) == (("head.weight",), ("more",))
    assert_holds(model, before)
    with caplog.at_level(logging.WARNING):
        load_checkpoint_in_model(model, tmp_path / "other", device_map)
    assert "were not used when" in caplog.text
    assert "more" in caplog.text
    assert "head.weight" in caplog.text


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, {"": "disk"}])
@pytest.mark.parametrize("strict", [False, True])
def test_other_shapes_are_refused_before_anything_is_assigned(tmp_path, device_map, strict):
    save(tmp_path / "other", STATE | {"head.weight": torch.ones(2, 2)})
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(bigload.StateDictMismatchError, match=r"\[2, 2\]"):
        load_checkpoint_in_model(model, tmp_path / "other", device_map, strict=strict)
    assert_holds(model, before)


def test_a_map_that_leaves_a_tensor_out_is_refused(folder):
    with pytest.raises(ValueError, match=r"no device for head\.weight"):
        load_checkpoint_in_model(Model(), folder, {"embed": "cpu", "norm": "cpu"})


def test_weights_saved_for_another_framework_are_refused(tmp_path):
    save_file(STATE, tmp_path / "model.safetensors", metadata={"format": "tf"})
    for fails in (load_state_dict, lambda path: load_checkpoint_in_model(Model(), path)):
        with pytest.raises(bigload.InvalidCheckpointError, match="saved for 'tf'"):
            fails(tmp_path / "model.safetensors")


def test_torch_files_of_the_old_form_stay_on_disk_only_in_a_folder(tmp_path):
    torch.save(STATE, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    with pytest.raises(bigload.OptionError, match=r"torch before 1\.6"):
        load_checkpoint_in_model(Model(), tmp_path / "old.bin", {"": "disk"})
    on_disk = load_checkpoint_in_model(Model(), tmp_path / "old.bin", {"": "disk"}, tmp_path / "offload")
    assert torch.equal(on_disk["head.weight"], STATE["head.weight"])


def test_weights_are_not_quantised_on_the_way(folder):
    with pytest.raises(bigload.OptionError, match="offload_8bit_bnb"):
        load_checkpoint_in_model(Model(), folder, offload_8bit_bnb=True)


@pytest.mark.parametrize("kind", ["plan", "plan file", "resharded folder"])
def test_a_plan_and_a_resharded_folder_bring_their_device_map(folder, tmp_path, kind):
    total = sum(tensor.nbytes for tensor in STATE.values())
    plan = bigload.plan(folder, {"cpu": total - 64})
    assert set(plan.device_map.values()) == {"cpu", "disk"}
    source = plan
    if kind == "plan file":
        source = tmp_path / "plan.json"
        bigload.write_plan(plan, source)
    elif kind == "resharded folder":
        source = tmp_path / "out"
        bigload.reshard(plan, source)
    model = on_meta()
    on_disk = load_checkpoint_in_model(model, source, strict=True)
    for name, tensor in STATE.items():
        is_weight_on_disk = str(plan.device_of(name)) == "disk" and name in dict(model.named_parameters())
        assert (name in on_disk) == is_weight_on_disk
        assert torch.equal(on_disk[name] if is_weight_on_disk else model.state_dict()[name], tensor)
    model = on_meta()
    assert load_checkpoint_in_model(model, source, {"": "cpu"}) == {}
    assert_holds(model)


@pytest.mark.parametrize(
    ("make", "dtype"), [(Model, None), (lambda: Model().double(), torch.float32), (lambda: Model().half(), None)]
)
def test_what_takes_the_place_of_something_is_loaded_in_batches(folder, monkeypatch, make, dtype):
    batch_bytes = 48
    monkeypatch.setattr(module_filling, "_BATCH_BYTES", batch_bytes)
    loads = []

    def noted(self, *arguments):
        loaded = load_now(self, *arguments)
        loads.append([tensor.nbytes for tensor in loaded.values()])
        return loaded

    load_now = CheckpointSource.load
    monkeypatch.setattr(CheckpointSource, "load", noted)
    model = make()
    kept = model.head.weight.dtype if dtype is None else dtype
    load_checkpoint_in_model(model, folder, dtype=dtype)
    assert_holds(model, {name: t.to(kept) if t.is_floating_point() else t for name, t in STATE.items()})
    largest = batch_bytes if dtype is None else STATE["head.weight"].nbytes  # a tensor that moves has to move whole
    assert max(map(sum, loads)) <= largest


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_an_offload_folder_is_filled_by_rows_of_what_is_large_and_written_once(folder, tmp_path, monkeypatch, dtype):
    batch_bytes = 48
    monkeypatch.setattr(module_filling, "_BATCH_BYTES", batch_bytes)
    loads = []

    def noted(self, *arguments):
        loaded = load_now(self, *arguments)
        loads.append(sum(tensor.nbytes for tensor in loaded.values()))
        return loaded

    load_now = CheckpointSource.load
    monkeypatch.setattr(CheckpointSource, "load", noted)
    written = []
    for values in (STATE, STATE, {name: tensor + 1 for name, tensor in STATE.items()}):
        save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
        on_disk = load_checkpoint_in_model(
            on_meta(), folder, {"": "disk"}, tmp_path / "offload", dtype, offload_buffers=True
        )
        is_cast = {name: dtype is not None and tensor.is_floating_point() for name, tensor in values.items()}
        expected = {name: tensor.to(dtype) if is_cast[name] else tensor for name, tensor in values.items()}
        assert all(torch.equal(on_disk[name], expected[name]) for name in on_disk)
        written.append({path.name: path.stat().st_ino for path in (tmp_path / "offload").glob("*.dat")})
    assert written[0] == written[1] != written[2]
    assert max(loads) <= batch_bytes


def test_tensors_of_a_file_are_returned_by_name_what_a_map_has_on_disk_on_the_cpu(folder):
    for device_map in (None, {"": "cpu"}, {"": "disk"}, {"head": "disk", "norm": "cpu"}):
        found = load_state_dict(str(folder / "model.safetensors"), device_map)
        assert found.keys() == STATE.keys()
        assert all(torch.equal(found[name], tensor) and found[name].is_cpu for name, tensor in STATE.items())


def test_of_tied_names_one_in_the_map_is_enough(folder):
    save(folder.parent / "tied", {name: tensor for name, tensor in STATE.items() if name != "head.weight"})
    model = on_meta(Tied)
    load_checkpoint_in_model(model, folder.parent / "tied", {"embed": "cpu", "norm": "cpu"}, strict=True)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, STATE["embed.weight"])


def test_a_plan_says_which_dtype_weights_get_unless_the_caller_does(folder):
    plan = bigload.plan(folder, {"cpu": "1GiB"}, dtype="bf16")
    for dtype in (None, torch.float16):
        model = on_meta()
        load_checkpoint_in_model(model, plan, dtype=dtype)
        assert model.embed.weight.dtype == (dtype or torch.bfloat16)
