"""A pipeline of diffusers is one checkpoint, whose tensors are named after their component."""

import json

import pytest

import bigload
from bigload import InvalidCheckpointError, UnsupportedFormatError, open_checkpoint
from builders import data_for, make_pipeline, write_shard


@pytest.fixture
def folder(tmp_path):
    return make_pipeline(tmp_path / "sd")


def test_a_pipeline_is_one_checkpoint_of_all_its_components(folder):
    pipeline = open_checkpoint(folder)
    weights = {each.name: each.checkpoint and list(each.checkpoint.tensors) for each in pipeline.components}
    assert weights == {
        "scheduler": None,
        "text_encoder": ["embed.weight", "layers.0.weight"],
        "unet": ["conv_in.weight", "down.weight"],
        "vae": ["decoder.weight"],
    }
    assert {name: tensor.span.file.partition("/")[0] for name, tensor in pipeline.tensors.items()} == {
        f"{name}.{tensor}": name for name, tensors in weights.items() for tensor in tensors or ()
    }
    assert pipeline.warnings == ()


def test_components_run_in_the_order_of_the_pipeline(folder):
    (folder / "safety_checker").mkdir()
    write_shard(folder / "safety_checker" / "model.safetensors", {"head.weight": ("F32", [4])})
    index = json.loads((folder / "model_index.json").read_text())
    index["safety_checker"] = ["stable_diffusion", "StableDiffusionSafetyChecker"]
    (folder / "model_index.json").write_text(json.dumps(index))
    plan = bigload.plan(folder, {"cpu": "1GiB"})
    order = list(dict.fromkeys(name.partition(".")[0] for name in plan.homes))
    assert order == ["text_encoder", "unet", "vae", "safety_checker"]


def test_bytes_of_a_pipeline_are_those_of_its_files(folder):
    loaded = bigload.load(folder)["unet.conv_in.weight"]
    assert loaded.numpy().tobytes() == data_for("conv_in.weight", 64, dtype="F32")


def test_variants_beside_a_component_are_not_taken_for_it(folder):
    write_shard(folder / "vae" / "diffusion_pytorch_model.fp16.safetensors", {"decoder.weight": ("F16", [4])})
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.fp16.json").write_text("{}")
    assert {tensor.dtype.name for tensor in open_checkpoint(folder).tensors.values()} == {"F32"}


def test_a_single_file_beside_a_pipeline_is_not_taken_for_it(folder):
    write_shard(folder / "v1-5.safetensors", {"model.weight": ("F32", [4])})
    assert "model.weight" not in open_checkpoint(folder).tensors
    assert list(open_checkpoint(folder / "v1-5.safetensors").tensors) == ["model.weight"]


def test_components_without_weights_here_are_named(folder):
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "vae" / "config.json").write_text("{}")
    (folder / "scheduler" / "scheduler_config.json").unlink()
    (folder / "scheduler").rmdir()
    texts = [warning.text for warning in open_checkpoint(folder).warnings if warning.code == "missing-component"]
    assert texts == [
        "scheduler (DDIMScheduler) has no folder here: the pipeline is not whole",
        "vae (AutoencoderKL) has a config.json and no weights here: the pipeline is not whole",
    ]


def test_a_component_in_another_format_is_refused_by_name(folder):
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(folder / "vae" / "model.onnx")
    with pytest.raises(UnsupportedFormatError, match=r"vae.*ONNX"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["..", "a/b", "a.b", "", "/etc", "a\0"])
def test_a_component_that_leaves_the_folder_is_refused(folder, name):
    (folder / "model_index.json").write_text(json.dumps({name: ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(InvalidCheckpointError) as refused:
        open_checkpoint(folder)
    assert refused.value.problems[0].file == "model_index.json"


def test_a_component_that_links_out_of_the_folder_is_refused(folder, tmp_path):
    (folder / "unet").rename(tmp_path / "elsewhere")
    (folder / "unet").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidCheckpointError, match="link that leaves the folder"):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, '{"vae": ["diffusers", "AutoencoderKL"]'])
def test_a_broken_model_index_is_an_invalid_checkpoint(folder, text):
    (folder / "model_index.json").write_text(text)
    with pytest.raises(InvalidCheckpointError, match=r"model_index\.json"):
        open_checkpoint(folder)


def test_a_pipeline_that_links_to_itself_ends(folder):
    (folder / "loop").symlink_to(".")
    (folder / "model_index.json").write_text(json.dumps({"loop": ["diffusers", "StableDiffusionPipeline"]}))
    with pytest.raises(bigload.CheckpointNotFoundError, match="none of whose components has weights"):
        open_checkpoint(folder)
