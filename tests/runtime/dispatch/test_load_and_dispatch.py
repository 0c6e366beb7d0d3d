"""Checkpoints and plans right into dispatched models. On accelerators: `tests/simulated/test_dispatch.py`."""

import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bigload
from bigload import load_and_dispatch, load_checkpoint_and_dispatch
from bigload.errors import (
    OptionError,
    PlanNotFoundError,
    StalePlanError,
    StateDictMismatchError,
)
from bigload.loading.load import load_selected
from bigload.runtime.dispatch import checkpoint_source
from builders import contents

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.proj(x).transpose(1, 2)).transpose(1, 2)


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    """Blocks with buffers, named as models of language are."""

    def __init__(self):
        super().__init__()
        self.model = Body()
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


class Tied(Model):
    def __init__(self):
        super().__init__()
        self.lm_head.weight = self.model.embed_tokens.weight


def made(kind=Model):
    torch.manual_seed(0)
    model = kind()
    for layer in model.model.layers:
        layer.norm.running_mean.uniform_()
        layer.norm.running_var.uniform_(0.5, 2)
    return model.eval()


def empty(kind=Model, **options):
    with bigload.init_empty_weights(**options):
        return kind().eval()


EXPECTED = made()(IDS).detach()
HALF = {"model.embed_tokens": "cpu", **{f"model.layers.{n}": "cpu" if n % 2 else "disk" for n in range(4)}}
HALF["lm_head"] = "disk"


@pytest.fixture
def folder(tmp_path):
    return save(made(), tmp_path / "checkpoint")


def save(model, folder):
    folder.mkdir()
    held = dict(model.named_parameters()) | dict(model.named_buffers())
    save_file({name: tensor.detach() for name, tensor in held.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("where", [{"": "disk"}, HALF, {"": "cpu"}], ids=["disk", "half", "cpu"])
@pytest.mark.parametrize("include_buffers", [False, True])
def test_a_loaded_model_answers_as_the_saved_one(folder, where, include_buffers):
    before = contents(folder)
    model = load_checkpoint_and_dispatch(empty(include_buffers=include_buffers), folder, where, strict=True)
    assert torch.equal(model(IDS), EXPECTED)
    assert model.hf_device_map == where
    assert where != {"": "disk"} or all(parameter.is_meta for parameter in model.parameters())
    assert contents(folder) == before, "what is on disk is read where it is"


def test_buffers_stay_on_disk_if_that_is_asked_for(folder):
    model = load_checkpoint_and_dispatch(empty(), folder, {"": "disk"}, offload_buffers=True)
    assert model.model.layers[0].norm.running_mean.is_meta
    assert torch.equal(model(IDS), EXPECTED)


def test_weights_are_written_to_an_offload_folder_if_one_is_given(folder, tmp_path):
    model = load_checkpoint_and_dispatch(empty(), folder, HALF, offload_folder=tmp_path / "offload")
    (folder / "model.safetensors").unlink()
    assert torch.equal(model(IDS), EXPECTED)
    index = bigload.OffloadFolder.open(tmp_path / "offload").tensors
    assert {name.rpartition(".")[0] for name in index} >= {"lm_head", "model.layers.0.proj"}


@pytest.mark.parametrize("offload_folder", [None, "offload"])
def test_the_dtype_is_that_of_weights_on_disk_as_well(folder, tmp_path, offload_folder):
    offload = None if offload_folder is None else tmp_path / offload_folder
    model = load_checkpoint_and_dispatch(empty(), folder, HALF, offload_folder=offload, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    expected = made().to(torch.bfloat16)(IDS)
    assert torch.equal(model(IDS), expected)


def test_a_missing_offload_folder_is_reported_before_anything_is_loaded(tmp_path):
    torch.save(made().state_dict(), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    model = empty()
    with pytest.raises(OptionError, match="offload_folder"):
        load_checkpoint_and_dispatch(model, tmp_path / "old.bin", HALF)
    assert all(parameter.is_meta for parameter in model.parameters())
    load_checkpoint_and_dispatch(model, tmp_path / "old.bin", HALF, offload_folder=tmp_path / "offload")
    assert torch.equal(model(IDS), EXPECTED)


def test_what_torch_saved_is_read_where_it_is_too(tmp_path):
    torch.save(made().state_dict(), tmp_path / "model.bin")
    assert torch.equal(load_checkpoint_and_dispatch(empty(), tmp_path / "model.bin", HALF)(IDS), EXPECTED)
    assert [path.name for path in tmp_path.iterdir()] == ["model.bin"]


def test_without_a_map_the_model_is_loaded_and_gets_no_hooks(folder):
    model = load_checkpoint_and_dispatch(made(), folder)
    assert not hasattr(model, "hf_device_map")
    assert torch.equal(model(IDS), EXPECTED)


def test_missing_and_unexpected_names_are_reported_and_refused_with_strict(folder, caplog):
    tensors = load_file(folder / "model.safetensors")
    tensors["extra"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StateDictMismatchError) as caught:
        load_checkpoint_and_dispatch(empty(), folder, {"": "cpu"}, strict=True)
    assert (caught.value.missing, caught.value.unexpected) == (("lm_head.weight",), ("extra",))
    model = made()
    with caplog.at_level(logging.WARNING, "bigload"):
        load_checkpoint_and_dispatch(model, folder, {"": "cpu"})
    assert "were not used when" in caplog.text
    assert "lm_head.weight" in caplog.text


@pytest.mark.parametrize("name", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_maps_can_be_asked_for_by_name(folder, name):
    limits = {"cpu": 1500}
    model = load_checkpoint_and_dispatch(empty(), folder, name, max_memory=limits, no_split_module_classes=["Block"])
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert limits == {"cpu": 1500}
    assert torch.equal(model(IDS), EXPECTED)


def test_other_names_of_maps_are_refused(folder):
    with pytest.raises(OptionError, match="fast"):
        load_checkpoint_and_dispatch(empty(), folder, "fast")


@pytest.mark.parametrize("head", ["cpu", "disk"])
@pytest.mark.parametrize("embedding", ["cpu", "disk"])
def test_tied_weights_stay_tied(tmp_path, head, embedding):
    folder = save(made(Tied), tmp_path / "checkpoint")
    where = {"": "disk", "lm_head": head, "model.embed_tokens": embedding}
    model = load_checkpoint_and_dispatch(empty(Tied), folder, where, strict=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(IDS), made(Tied)(IDS))


def plan_of(folder):
    return bigload.plan(folder, {"cpu": 2400})


@pytest.mark.parametrize("form", ["plan", "file", "folder"])
def test_a_plan_is_carried_out(folder, tmp_path, form):
    plan = plan_of(folder)
    assert {str(device) for device in plan.homes.values()} == {"cpu", "disk"}
    source = plan
    if form == "file":
        source = tmp_path / "plan.json"
        bigload.write_plan(plan, source)
    elif form == "folder":
        source = tmp_path / "resharded"
        bigload.reshard(plan, source)
        (folder / "model.safetensors").unlink()
    model = load_and_dispatch(empty(), source)
    assert torch.equal(model(IDS), EXPECTED)
    assert {str(device) for device in model.hf_device_map.values()} == {"cpu", "disk"}


def test_a_resharded_folder_is_read_once_and_what_is_for_the_disk_not_at_all(folder, tmp_path, monkeypatch):
    calls = []

    def load(checkpoint, selection, *options, **more):
        calls.append([want.tensor.span for want in selection.wanted])
        return load_selected(checkpoint, selection, *options, **more)

    monkeypatch.setattr(checkpoint_source, "load_selected", load)
    bigload.reshard(plan_of(folder), tmp_path / "resharded")
    load_and_dispatch(empty(include_buffers=True), tmp_path / "resharded")
    (spans,) = [call for call in calls if call]
    parameters = [span for span in spans if span.file.startswith("cpu/")]
    buffers = [span for span in spans if span.file.startswith("offload/")]
    assert len(parameters) + len(buffers) == len(spans)
    assert sum(span.num_bytes for span in buffers) == 2 * (2 * 8 * 4 + 8)
    assert len(set(spans)) == len(spans)


def test_a_plan_can_be_the_checkpoint_of_load_checkpoint_and_dispatch(folder, tmp_path):
    bigload.write_plan(plan_of(folder), tmp_path / "plan.json")
    model = load_checkpoint_and_dispatch(empty(), tmp_path / "plan.json", HALF)
    assert torch.equal(model(IDS), EXPECTED)


def test_the_plan_of_tied_weights_is_carried_out(tmp_path):
    folder = save(made(Tied), tmp_path / "checkpoint")
    model = load_and_dispatch(empty(Tied), plan_of(folder))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model(IDS), made(Tied)(IDS))


def test_a_plan_for_another_checkpoint_is_refused(folder):
    plan = plan_of(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "extra": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(StalePlanError):
        load_and_dispatch(empty(), plan)


def test_a_folder_without_a_plan_is_refused(folder):
    with pytest.raises(PlanNotFoundError):
        load_and_dispatch(empty(), folder)
