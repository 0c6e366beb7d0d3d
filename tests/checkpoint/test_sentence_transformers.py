"""A folder of sentence-transformers is one checkpoint of all its modules that have weights."""

import json

import pytest

import bigload
from bigload import InvalidCheckpointError, open_checkpoint
from bigload.errors import OptionError
from builders import data_for, write_shard

DENSE = {"linear.weight": ("F32", [8, 4]), "linear.bias": ("F32", [8])}
MODEL = {"embeddings.word_embeddings.weight": ("F32", [16, 4]), "encoder.layer.0.output.dense.weight": ("F32", [4, 4])}
MODEL |= {"pooler.dense.weight": ("F32", [4, 4])}


def entry(number, name, kind):
    return {"idx": number, "name": str(number), "path": name, "type": f"sentence_transformers.models.{kind}"}


@pytest.fixture
def folder(tmp_path):
    """What `SentenceTransformer.save` writes."""
    folder = tmp_path / "labse"
    for module in ("1_Pooling", "2_Dense"):
        (folder / module).mkdir(parents=True)
        (folder / module / "config.json").write_text(json.dumps({"of": module}))
    write_shard(folder / "model.safetensors", MODEL)
    write_shard(folder / "2_Dense" / "model.safetensors", DENSE)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "dtype": "float32"}))
    modules = [entry(0, "", "Transformer"), entry(1, "1_Pooling", "Pooling"), entry(2, "2_Dense", "Dense")]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def test_weights_of_dense_modules_are_tensors_under_the_name_of_their_folder(folder):
    found = open_checkpoint(folder)
    assert found.tensors.keys() == MODEL.keys() | {f"2_Dense.{name}" for name in DENSE}
    assert found.config == {"model_type": "bert", "dtype": "float32"}
    assert [(each.name, each.class_name, each.checkpoint is None) for each in found.components] == [
        ("", "Transformer", False),
        ("1_Pooling", "Pooling", True),
        ("2_Dense", "Dense", False),
    ]
    loaded = bigload.load(folder)["2_Dense.linear.bias"]
    assert loaded.numpy().tobytes() == data_for("linear.bias", 32, dtype="F32")


def test_a_plan_counts_them_after_the_model(folder):
    plan = bigload.plan(folder, {"cpu": "1GiB"})
    assert list(plan.homes)[-1].startswith("2_Dense")
    assert sum(use.weights_bytes for use in plan.devices) == open_checkpoint(folder).total_bytes


def test_a_folder_without_other_weights_stays_a_model(folder):
    (folder / "2_Dense" / "model.safetensors").unlink()
    found = open_checkpoint(folder)
    assert found.components == ()
    assert found.tensors.keys() == MODEL.keys()


def test_a_module_that_cannot_be_read_is_named_and_carried_along(folder, tmp_path):
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    found = open_checkpoint(folder)
    assert [warning.code for warning in found.warnings] == ["unread-module"]
    assert "2_Dense (Dense) is not counted: " in found.warnings[0].text
    bigload.reshard(folder, tmp_path / "out", dtype="bf16")
    assert (tmp_path / "out/2_Dense/pytorch_model.bin").is_file()


def test_a_transformer_in_a_folder_is_opened_too(folder):
    (folder / "0_Transformer").mkdir()
    (folder / "model.safetensors").rename(folder / "0_Transformer" / "model.safetensors")
    modules = [entry(0, "0_Transformer", "Transformer"), entry(2, "2_Dense", "Dense")]
    (folder / "modules.json").write_text(json.dumps(modules))
    assert next(iter(bigload.plan(folder, {"cpu": "1GiB"}).homes)).startswith("0_Transformer")


@pytest.mark.parametrize("size", [None, 64])
def test_a_reshard_keeps_folders_and_one_file_for_each_module(folder, tmp_path, size):
    (folder / "sparse_linear.pt").write_bytes(b"of another part")
    out = tmp_path / "out"
    bigload.reshard(folder, out, dtype="bf16", max_shard_bytes=size)
    expected = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()} - {"bigload-manifest.json"}
    if size:
        expected -= {"model.safetensors"}
        found = {name for name in found if not name.startswith("model")}
    assert found == expected
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert json.loads((out / "2_Dense/config.json").read_text()) == {"of": "2_Dense"}
    assert open_checkpoint(out / "2_Dense").tensors.keys() == DENSE.keys()
    again = open_checkpoint(out)
    assert {tensor.dtype.name for tensor in again.tensors.values()} == {"BF16"}
    assert again.tensors.keys() == open_checkpoint(folder).tensors.keys()
    bigload.verify(out)


@pytest.mark.parametrize("options", [{"tp": 2}, {"layout": "offload"}, {"names": "transformers"}])
def test_what_is_of_one_model_names_the_file_of_the_transformer(folder, tmp_path, options):
    with pytest.raises(OptionError) as refused:
        bigload.reshard(folder, tmp_path / "out", **options)
    assert f"for example {folder / 'model.safetensors'}" in str(refused.value)


@pytest.mark.parametrize("text", ["{}", "[1]", "[" * 100_000, '[{"path": 1, "type": "a.Dense"}]'])
def test_a_broken_list_of_modules_is_an_invalid_checkpoint(folder, text):
    (folder / "modules.json").write_text(text)
    with pytest.raises(InvalidCheckpointError, match=r"modules\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["..", "/etc", "../labse", "a/b"])
def test_modules_elsewhere_are_not_opened(folder, name):
    (folder / "modules.json").write_text(json.dumps([entry(0, "", "Transformer"), entry(1, name, "Dense")]))
    assert open_checkpoint(folder).components == ()


def test_a_module_that_links_out_of_the_folder_is_refused(folder, tmp_path):
    (folder / "2_Dense").rename(tmp_path / "elsewhere")
    (folder / "2_Dense").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidCheckpointError, match="link that leaves the folder"):
        open_checkpoint(folder)
