"""Pipelines of diffusers are resharded and fetched with all their components, names and JSON files."""

import json

import pytest

import bigload
from bigload import MergeLora, OptionError, Rename
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from builders import contents, make_pipeline, stored_tensors, write_shard
from hub_server import served_hub


@pytest.fixture
def folder(tmp_path):
    return make_pipeline(tmp_path / "sd")


def weights_of(folder):
    """Return the tensors of each component, with their bytes."""
    return {
        component: stored_tensors(*sorted((folder / component).glob("*.safetensors")))
        for component in ("text_encoder", "unet", "vae")
    }


def documents_of(folder):
    """Return all JSON files but indexes and manifests."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.json")}
    return {
        name: path.read_bytes()
        for name, path in files.items()
        if path.name != MANIFEST_FILE and not name.endswith(".index.json")
    }


def test_components_keep_their_folders_names_and_json_files(folder, tmp_path):
    bigload.reshard(folder, tmp_path / "out", max_shard_bytes=100)
    assert weights_of(tmp_path / "out") == weights_of(folder)
    assert documents_of(tmp_path / "out") == documents_of(folder)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.safetensors*")}
    assert {name for name in names if name.startswith(("unet", "vae"))} == {
        "unet/diffusion_pytorch_model-00001-of-00002.safetensors",
        "unet/diffusion_pytorch_model-00002-of-00002.safetensors",
        "unet/diffusion_pytorch_model.safetensors.index.json",
        "vae/diffusion_pytorch_model.safetensors",
    }
    assert bigload.open_checkpoint(tmp_path / "out").tensors.keys() == bigload.open_checkpoint(folder).tensors.keys()
    assert bigload.verify(tmp_path / "out").ok


def test_only_configs_of_transformers_state_a_dtype(folder, tmp_path):
    pytest.importorskip("torch")
    bigload.reshard(folder, tmp_path / "out", dtype="bf16")
    stated = {name: json.loads(text).get("torch_dtype") for name, text in documents_of(tmp_path / "out").items()}
    assert {name for name, dtype in stated.items() if dtype is not None} == {"text_encoder/config.json"}
    assert {tensor.dtype.name for tensor in bigload.open_checkpoint(tmp_path / "out").tensors.values()} == {"BF16"}


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "offload"},
        {"tp": 2},
        {"names": "transformers"},
        {"transforms": [Rename.parse("s/a/b/")]},
        {"transforms": [MergeLora("adapter")]},
    ],
)
def test_what_only_a_model_has_names_a_component_instead(folder, tmp_path, options):
    with pytest.raises(OptionError, match="sd is a pipeline of several models") as refused:
        bigload.reshard(folder, tmp_path / "out", **options)
    assert str(folder / "text_encoder") in (refused.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_a_plan_of_a_pipeline_is_no_layout_of_it(folder, tmp_path):
    with pytest.raises(OptionError, match="pipeline of several models"):
        bigload.reshard(bigload.plan(folder, {"cpu": "1GiB"}), tmp_path / "out")


def test_a_pipeline_is_fetched_without_variants_and_single_files(folder, tmp_path):
    whole = contents(folder)
    for name in ("all-in-one.safetensors", "vae/diffusion_pytorch_model.fp16.safetensors", "unet/model.onnx"):
        write_shard(folder / name, {"a": ("F32", [4])})
    bigload.fetch(folder, tmp_path / "out")
    assert {name: found for name, found in contents(tmp_path / "out").items() if name != MANIFEST_FILE} == whole


@pytest.mark.parametrize("options", [{"only": "unet"}, {"rank": 0, "tp": 2}])
def test_parts_of_a_pipeline_are_not_fetched(folder, tmp_path, options):
    with pytest.raises(OptionError, match="pipeline of several models"):
        bigload.fetch(folder, tmp_path / "out", **options)


def test_a_pipeline_of_the_hub_is_fetched_and_resharded(folder, tmp_path, monkeypatch):
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        server.add("org/sd", folder)
        bigload.fetch("org/sd", tmp_path / "fetched")
        bigload.reshard("org/sd", tmp_path / "resharded", layout="shards")
        remote = bigload.open_checkpoint("org/sd")
    assert [component.name for component in remote.components] == ["scheduler", "text_encoder", "unet", "vae"]
    for out in (tmp_path / "fetched", tmp_path / "resharded"):
        assert weights_of(out) == weights_of(folder)
        assert documents_of(out) == documents_of(folder)
