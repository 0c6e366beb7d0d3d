import json

import pytest
import safetensors
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from strategies import forms

from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DTYPES
from bigload.layouts.dtype_rules import DTypeRule
from builders import (
    checkpoint_of,
    laid_out,
    llama_config,
    llama_tensors,
    make_checkpoint,
    read_by_both,
    stored_tensors,
    write_output,
    write_sharded,
)

TIED = {"model.embed_tokens.weight", "lm_head.weight"}


def tied_source(folder, *, config):
    """A torch file in which embedding and head are one tensor, and two norms are another that no config knows of."""
    table, norm = torch.randn(16, 8), torch.randn(64)
    state = {
        "lm_head.weight": table,
        "model.embed_tokens.weight": table,
        "model.layers.0.a.weight": torch.randn(8, 8).bfloat16(),
        "model.layers.0.norm.weight": norm,
        "model.layers.1.norm.weight": norm,
    }
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return state


@pytest.mark.parametrize("limit", [None, 10**9])
def test_what_fits_into_one_file_is_one_without_an_index(tmp_path, limit):
    source = make_checkpoint(tmp_path / "source", shards=3)
    output = laid_out("shards", open_checkpoint(source), max_shard_bytes=limit)
    out = write_output(output, source, tmp_path / "out")
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    assert stored_tensors(out / "model.safetensors") == stored_tensors(*source.glob("*.safetensors"))


def test_more_files_are_numbered_and_mapped_in_the_order_of_a_load():
    tensors = llama_tensors(12, hidden=32)
    output = laid_out("shards", checkpoint_of(dict(sorted(tensors.items()))), max_shard_bytes=20_000)
    count = len(output.files)
    assert [written.file for written in output.files] == [
        f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)
    ]
    blocks = [t.name.split(".")[2] for written in output.files for t in written.tensors if ".layers." in t.name]
    assert sorted(blocks, key=int) == blocks
    assert list(output.documents) == ["model.safetensors.index.json"]


def test_a_torch_file_that_ties_what_the_config_ties_keeps_one_name_as_save_pretrained_does(tmp_path):
    state = tied_source(tmp_path / "source", config=llama_config(tied=True))
    output = laid_out("shards", open_checkpoint(tmp_path / "source"))
    out = write_output(output, tmp_path / "source", tmp_path / "out")
    assert output.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    found = load_file(out / "model.safetensors")
    assert found.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())
    with safetensors.safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lm_head.weight": "model.embed_tokens.weight"}


SILENT = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
"""transformers gives a model of this config a head of its own, at random where the checkpoint has none."""


@pytest.mark.parametrize("config", [None, llama_config(tied=False), SILENT])
def test_names_that_no_config_ties_are_all_written(tmp_path, config):
    state = tied_source(tmp_path / "source", config=config)
    output = laid_out("shards", open_checkpoint(tmp_path / "source"))
    found = load_file(write_output(output, tmp_path / "source", tmp_path / "out") / "model.safetensors")
    assert not output.aliases
    assert found.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


class HeadInBf16(DTypeRule):
    def __call__(self, tensor):
        return DTYPES["BF16"] if tensor.name == "lm_head.weight" else tensor.dtype


def test_tied_names_that_are_written_in_two_dtypes_are_both_written(tmp_path):
    tied_source(tmp_path / "source", config=llama_config(tied=True))
    output = laid_out("shards", open_checkpoint(tmp_path / "source"), dtypes=HeadInBf16())
    assert {tensor.name for written in output.files for tensor in written.tensors} >= TIED


def test_equal_bytes_that_the_source_stores_twice_stay_two_tensors():
    tensors = {"model.embed_tokens.weight": ("U8", [4, 4]), "layers.0.a": 4, "lm_head.weight": ("U8", [4, 4])}
    output = laid_out("shards", checkpoint_of(tensors, config=llama_config(tied=True)))
    assert {tensor.name for written in output.files for tensor in written.tensors} >= TIED


@given(tensors=forms(), max_shard_bytes=st.none() | st.integers(1, 5000))
def test_every_tensor_is_once_in_files_within_the_limit_that_both_readers_take(tensors, max_shard_bytes):
    found = read_by_both(laid_out("shards", checkpoint_of(tensors), max_shard_bytes=max_shard_bytes), max_shard_bytes)
    assert found == {name: (dtype, list(shape)) for name, (dtype, shape) in tensors.items()}


# Names that libraries look for


# Names that libraries look for


def files_of(folder, names, **options):
    tensors = {f"layers.{number}.weight": ("F32", [4]) for number in range(2)}
    if names[0].endswith(".safetensors"):
        shards = {
            name: dict(tensors.items() if len(names) == 1 else [each])
            for name, each in zip(names, tensors.items(), strict=False)
        }
        write_sharded(folder, shards)
        base = names[0].removesuffix(".safetensors").removesuffix("-00001-of-00002")
        (folder / "model.safetensors.index.json").rename(folder / f"{base}.safetensors.index.json")
        if len(names) == 1:
            (folder / f"{base}.safetensors.index.json").unlink()
    else:
        folder.mkdir()
        torch.save({name: torch.ones(4) for name in tensors}, folder / names[0])
    output = laid_out("shards", open_checkpoint(folder), **options)
    return [*(file.file for file in output.files), *output.documents]


@pytest.mark.parametrize(
    ("names", "base"),
    [
        (["model.safetensors"], "model"),
        (["diffusion_pytorch_model.safetensors"], "diffusion_pytorch_model"),
        (["diffusion_pytorch_model.fp16.safetensors"], "diffusion_pytorch_model.fp16"),
        ([f"diffusion_pytorch_model-0000{n}-of-00002.safetensors" for n in (1, 2)], "diffusion_pytorch_model"),
        (["pytorch_lora_weights.safetensors"], "pytorch_lora_weights"),
        (["diffusion_pytorch_model.bin"], "diffusion_pytorch_model"),
        (["pytorch_model.bin"], "model"),
        (["weights.pt"], "model"),
    ],
)
def test_files_keep_the_names_that_libraries_look_for(tmp_path, names, base):
    assert files_of(tmp_path / "one", names) == [f"{base}.safetensors"]
    numbered = [f"{base}-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert files_of(tmp_path / "two", names, max_shard_bytes=16) == [*numbered, f"{base}.safetensors.index.json"]


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_stays_one_file_because_peft_reads_no_index(tmp_path, name):
    assert files_of(tmp_path / "adapter", [name], max_shard_bytes=16) == ["adapter_model.safetensors"]
