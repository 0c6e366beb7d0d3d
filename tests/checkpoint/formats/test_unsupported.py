"""Weights in formats that bigload does not read are named for what they are, with what to do."""

import json
import struct

import pytest

from bigload.checkpoint.source import open_checkpoint
from bigload.errors import CheckpointNotFoundError, UnsupportedFormatError
from builders import make_checkpoint, write_shard

FILES = {
    "ggml-model.bin": (b"GGUF\x03\x00\x00\x00", "a GGUF file of llama.cpp", "rename it"),
    "model.onnx": (b"\x08\x07", "an ONNX graph", "exported from"),
    "tf_model.h5": (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "from_tf=True"),
    "weights.npz": (b"PK\x03\x04", "a NumPy archive", "numpy.load"),
    "weight.npy": (b"\x93NUMPY\x01\x00", "a NumPy archive", "numpy.load"),
    "flax_model.msgpack": (b"\x82", "Flax weights", "from_flax=True"),
    "last.ckpt": (b"PK\x03\x04", "a torch file under another suffix", "rename it to end with .pt"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_format_is_named(tmp_path, name):
    content, what, hint = FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedFormatError, match=f"it is {what}") as refused:
        open_checkpoint(tmp_path / name)
    assert hint in refused.value.hint


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".bin")])
def test_a_folder_of_another_format_is_named(tmp_path, name):
    content, what, hint = FILES[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnsupportedFormatError, match=f"{name}: it is {what}") as refused:
        open_checkpoint(tmp_path)
    assert hint in refused.value.hint


def test_other_formats_beside_a_checkpoint_do_not_matter(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    for name, (content, _, _) in FILES.items():
        (folder / name).write_bytes(content)
    assert open_checkpoint(folder).tensors


def test_a_file_too_short_for_any_format_is_no_crash(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="empty"):
        open_checkpoint(tmp_path / "model.safetensors")


DEEPSPEED = {
    "root": {"zero_to_fp32.py": "", "latest": "global_step100", "rng_state_0.pth": "", "scheduler.pt": ""},
    "without the script": {"latest": "global_step100", "config.json": "{}"},
    "step": {
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt": "",
        "mp_rank_00_model_states.pt": "",
    },
}


@pytest.mark.parametrize("files", DEEPSPEED.values(), ids=DEEPSPEED)
def test_a_folder_of_deepspeed_is_named(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UnsupportedFormatError, match="it is a checkpoint of DeepSpeed ZeRO") as refused:
        open_checkpoint(tmp_path)
    assert "python zero_to_fp32.py . OUT --safe_serialization" in refused.value.hint


def test_a_whole_model_beside_deepspeed_files_is_read(tmp_path):
    """The Trainer saves both, with `stage3_gather_16bit_weights_on_model_save`."""
    folder = make_checkpoint(tmp_path / "model")
    for name, text in DEEPSPEED["root"].items():
        (folder / name).write_text(text)
    assert open_checkpoint(folder).tensors


def test_another_file_named_latest_says_nothing(tmp_path):
    (tmp_path / "latest").write_text("v2")
    with pytest.raises(CheckpointNotFoundError):
        open_checkpoint(tmp_path)


def make_adapter(folder, config):
    folder.mkdir()
    write_shard(folder / "adapter_model.safetensors", {"base_model.model.q_proj.lora_A.weight": ("F32", [8, 4])})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_is_read_and_says_what_it_is(tmp_path):
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    (warning,) = open_checkpoint(make_adapter(tmp_path / "lora", config)).warnings
    assert warning.code == "adapter"
    assert "LoRA adapter of rank 8 for meta-llama/Llama-3.1-8B" in warning.text
    assert "plan its base model" in warning.text


@pytest.mark.parametrize(("targets", "shown"), [(["v_proj", "q_proj"], ", on q_proj, v_proj,"), (".*q", ""), ([1], "")])
def test_targets_of_an_adapter_are_said_where_they_are_a_list(tmp_path, targets, shown):
    config = {"peft_type": "LORA", "r": 8, "target_modules": targets}
    (warning,) = open_checkpoint(make_adapter(tmp_path / "lora", config)).warnings
    assert f"for a base model{shown}" in warning.text
    assert (", on " in warning.text) == bool(shown)


@pytest.mark.parametrize("config", [[], {"r": "x", "base_model_name_or_path": None}, {"peft_type": ["LORA"]}])
def test_an_odd_config_of_an_adapter_is_no_crash(tmp_path, config):
    assert open_checkpoint(make_adapter(tmp_path / "lora", config)).tensors


def test_an_adapter_without_weights_is_named(tmp_path):
    (make_adapter(tmp_path / "lora", {}) / "adapter_model.safetensors").unlink()
    with pytest.raises(UnsupportedFormatError, match="an adapter whose weights"):
        open_checkpoint(tmp_path / "lora")


def test_of_several_files_without_an_index_the_hint_names_one(tmp_path):
    for name in ("a", "b"):
        write_shard(tmp_path / f"{name}.safetensors", {name: ("F32", [struct.calcsize("f")])})
    with pytest.raises(CheckpointNotFoundError, match=r"2 \.safetensors files but no index") as refused:
        open_checkpoint(tmp_path)
    assert refused.value.hint == f"name the one you mean: {tmp_path / 'a.safetensors'}"
