"""Checkpoints that name and divide tensors in another way than the model, loaded, offloaded and streamed."""

import copy
from dataclasses import replace

import pytest
import torch
from converted_models import IDS, Converted, convert, made_converted, saved_converted, stored_state, view_of
from streamed_models import blocks_of

import bigload
from bigload import load_and_dispatch, load_checkpoint_and_dispatch, load_checkpoint_in_model
from bigload.devices import Device
from bigload.errors import DeviceMapError, ReadError, StateDictMismatchError
from bigload.runtime.dispatch import module_filling
from bigload.runtime.dispatch.planned_map import planned_map
from bigload.runtime.offload.assembled_weights import AssembledWeight
from bigload.runtime.offload.stored_weights import FileWeight
from builders import contents

PLAIN = made_converted()
EXPECTED = PLAIN(IDS).detach()
MIXED = {"model.embed": "cpu", "model.rotary": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
MIXED |= {"model.layers.2": "disk", "head": "disk"}
MAPS = {"cpu": {"": "cpu"}, "cpu and disk": MIXED, "disk": {"": "disk"}}


def empty():
    with bigload.init_empty_weights(include_buffers=False):
        return Converted().eval()


def assert_same(model, expected=PLAIN):
    found = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    assert found
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected.state_dict()[name])] == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    convert(monkeypatch)
    return saved_converted(tmp_path / "checkpoint")


@pytest.mark.parametrize("where", MAPS)
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.sample(3)
def test_a_model_answers_wherever_its_parts_are(folder, where, prefetch):
    before = contents(folder)
    model = load_checkpoint_and_dispatch(empty(), folder, MAPS[where], strict=True, prefetch=prefetch)
    for _ in range(2):
        assert torch.equal(model(IDS), EXPECTED)
    assert where != "disk" or all(parameter.is_meta for parameter in model.parameters())
    assert contents(folder) == before


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_is_assembled_is_cast_on_the_way(folder, prefetch):
    model = load_checkpoint_and_dispatch(empty(), folder, MAPS["disk"], dtype="bfloat16", prefetch=prefetch)
    expected = copy.deepcopy(PLAIN).to(torch.bfloat16)
    assert torch.equal(model(IDS), expected(IDS))


def test_streamed_blocks_come_and_go(folder):
    model = load_checkpoint_and_dispatch(empty(), folder, MAPS["disk"], prefetch_bytes="1KiB", resident_bytes=0)
    for _ in range(3):
        assert torch.equal(model(IDS), EXPECTED)
    layer = blocks_of(model)["model.layers.0"]
    assert layer.num_bytes >= sum(parameter.nbytes for parameter in PLAIN.model.layers[0].experts.parameters())


def test_rows_of_a_tensor_are_used_in_the_pages_of_the_file(folder):
    weights = bigload.StoredWeights(view_of(bigload.open_checkpoint(folder)))
    assert isinstance(weights.source("model.layers.0.k.weight"), FileWeight)
    assert isinstance(weights.source("model.layers.0.experts.down"), AssembledWeight)
    first, again = (weights["model.layers.0.k.weight"] for _ in range(2))
    assert first.data_ptr() == again.data_ptr()
    assert list(weights) == list(view_of(bigload.open_checkpoint(folder)).tensors)
    for name, tensor in weights.items():
        assert torch.equal(tensor, PLAIN.state_dict()[name]), name


def test_only_what_a_file_holds_as_a_tensor_is_in_the_index_for_others(folder):
    model = load_checkpoint_and_dispatch(empty(), folder, MAPS["disk"])
    index = model.head._hf_hook.weights_map.dataset.index
    assert {name: entry["weight_name"] for name, entry in index.items()} == {
        "model.embed.weight": "embed.weight",
        "head.weight": "head.weight",
    }


@pytest.mark.parametrize("batch_bytes", [64, 1 << 20], ids=["in rows", "whole"])
def test_an_offload_folder_gets_the_tensors_of_the_model(folder, tmp_path, monkeypatch, batch_bytes):
    monkeypatch.setattr(module_filling, "_BATCH_BYTES", batch_bytes)
    model = load_checkpoint_and_dispatch(empty(), folder, MAPS["disk"], offload_folder=tmp_path / "offload")
    for path in folder.iterdir():
        path.unlink()
    assert torch.equal(model(IDS), EXPECTED)
    held = bigload.StoredWeights(tmp_path / "offload")
    assert {name: tensor.shape for name, tensor in held.items()} == {
        name: tensor.shape for name, tensor in PLAIN.state_dict().items()
    }


def test_a_model_with_memory_is_filled_in_rows(folder, monkeypatch):
    monkeypatch.setattr(module_filling, "_BATCH_BYTES", 64)
    torch.manual_seed(1)
    model = Converted()
    load_checkpoint_in_model(model, folder, strict=True)
    assert_same(model)


def test_old_torch_files_are_converted_too(tmp_path, monkeypatch):
    convert(monkeypatch)
    torch.save(stored_state(PLAIN), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    model = empty()
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert_same(model)


def plan_of(folder, share):
    total = bigload.open_checkpoint(folder).total_bytes
    return bigload.plan(folder, {"cpu": int(total * share)})


@pytest.mark.parametrize("share", [0.5, 0.7, 1.5])
def test_a_plan_with_the_names_of_the_checkpoint_is_carried_out(folder, share):
    plan = plan_of(folder, share)
    model = load_and_dispatch(empty(), plan)
    assert torch.equal(model(IDS), EXPECTED)
    view = view_of(bigload.open_checkpoint(folder))
    for name, tensor in model.named_parameters():
        assert {tensor.is_meta} == {str(plan.device_of(source)) == "disk" for source in view.sources(name)}, name


def test_modules_whose_tensors_agree_are_one_key_and_computed_ones_go_along(folder):
    model = load_and_dispatch(empty(), plan_of(folder, 0.7))
    assert model.hf_device_map["model.rotary"] == model.hf_device_map["model.embed"]
    assert {"model.layers.0.experts", "model.layers.2", "head"} <= model.hf_device_map.keys()


def test_a_plan_can_be_the_checkpoint(folder):
    model = empty()
    on_disk = load_checkpoint_in_model(model, plan_of(folder, 0.7))
    assert set(on_disk) == {name for name, parameter in model.named_parameters() if parameter.is_meta} != set()
    assert_same(model)
    assert all(torch.equal(on_disk[name], PLAIN.state_dict()[name]) for name in on_disk)


def test_a_plan_that_divides_fused_experts_is_refused_by_their_names(folder):
    plan, disk = plan_of(folder, 1.5), Device.parse("disk")
    divided = replace(plan, homes={**plan.homes, "blocks.1.experts.2.w1": disk, "blocks.2.experts.0.w2": disk})
    with pytest.raises(DeviceMapError, match="parts of 2 tensors") as caught:
        planned_map(empty(), divided, view_of(bigload.open_checkpoint(folder)))
    assert set(caught.value.names) == {"model.layers.1.experts.gate_up", "model.layers.2.experts.down"}
    assert "blocks.1.experts.2.w1 on disk" in str(caught.value)
    assert "plan whole blocks" in str(caught.value)


def test_all_that_is_wrong_is_said_at_once(tmp_path, monkeypatch):
    convert(monkeypatch, unexpected=("blocks.9.extra",), problems=("head.weight would be [3], and is [4]",))
    folder = saved_converted(tmp_path)
    with pytest.raises(StateDictMismatchError, match=r"1 unexpected.*1 problem of conversion") as caught:
        load_checkpoint_in_model(empty(), folder, strict=True)
    assert "blocks.9.extra" in str(caught.value)
    with pytest.raises(StateDictMismatchError) as caught:  # what cannot be made is not left out
        load_checkpoint_in_model(empty(), folder)
    assert "strict" not in caught.value.hint


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_file_that_has_changed_is_noticed(folder, prefetch):
    model = load_checkpoint_and_dispatch(empty(), folder, MAPS["disk"], prefetch=prefetch)
    path = folder / "model-2.safetensors"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content + b"\0")
    with pytest.raises(ReadError, match="model-2"):
        model(IDS)
