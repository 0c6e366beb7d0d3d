"""Distributed checkpoints of torch: what real ranks save is found, joined, loaded and written as one folder."""

import distributed_checkpoints as saved
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import bigload
from bigload.errors import OptionError, UnsupportedFormatError
from rank_processes import run_ranks

KINDS = [("fsdp", 3), ("fsdp+tp", 4)]
SIMPLE_KINDS = [("fsdp", 2), ("tp", 2)]


@pytest.fixture(
    scope="module", params=[*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SIMPLE_KINDS)], ids=str
)
def folder(request, tmp_path_factory):
    if not hasattr(dcp, "HuggingFaceStorageWriter"):
        pytest.skip("torch 2.6 shards no model on the CPU")
    kind, size = request.param
    made = tmp_path_factory.mktemp("dcp") / "saved"
    assert run_ranks(size, saved.save, kind, str(made)) == [True] * size
    return made


def equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_the_model_is_read_under_its_own_names(folder):
    expected = saved.model().state_dict()
    opened = bigload.open_checkpoint(folder)
    assert opened.format == "dcp"
    assert opened.assembled
    assert {name: tensor.shape for name, tensor in opened.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert opened.total_bytes == opened.stored_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert "that are no weights: 'optim." in opened.warnings[0].text
    assert "--all-tensors" in opened.warnings[0].text
    again = bigload.open_checkpoint(folder, all_tensors=True).warnings
    assert not any("--all-tensors" in warning.text for warning in again)
    equal(dict(bigload.load(folder)), expected)


def test_it_is_written_as_one_folder_of_safetensors_as_torch_would(folder, tmp_path):
    dcp_to_torch_save(folder, tmp_path / "torch.pt")
    bigload.reshard(folder, tmp_path / "out", max_shard_bytes=None)
    equal(load_file(tmp_path / "out" / "model.safetensors"), torch.load(tmp_path / "torch.pt")["model"])


def test_all_tensors_are_read_on_demand(folder):
    opened = bigload.open_checkpoint(folder, all_tensors=True)
    assert "optim.state.up.weight.exp_avg" in opened.tensors
    equal(
        {name.removeprefix("model."): each for name, each in bigload.load(opened).items() if name.startswith("model.")},
        saved.model().state_dict(),
    )


def test_a_model_is_filled(folder):
    made = saved.Mlp()
    bigload.load(folder, into=made)
    equal(made.state_dict(), saved.model().state_dict())


def test_experts_of_several_ranks_are_joined(tmp_path):
    run_ranks(2, saved.save_experts, str(tmp_path / "saved"))
    equal(dict(bigload.load(tmp_path / "saved")), saved.experts())


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageWriter"), reason="torch 2.6 has none")
@pytest.mark.parametrize(
    ("kind", "size"), [*KINDS, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in SIMPLE_KINDS)]
)
def test_parts_in_safetensors_are_joined_as_torch_consolidates_them(tmp_path, kind, size):
    """torch's consolidation refuses whole numbers and booleans, which the parts may have."""
    assert run_ranks(size, saved.save_consolidated, kind, str(tmp_path / "torch")) == [True] * size
    bigload.reshard(tmp_path / "torch" / "sharded", tmp_path / "out", max_shard_bytes=None)
    found = load_file(tmp_path / "out" / "model.safetensors")  # the name that readers look for
    expected = {}
    for file in (tmp_path / "torch").glob("model-*.safetensors"):
        expected |= load_file(file)
    equal(found, expected)
    equal(found, {name: each for name, each in saved.model().state_dict().items() if each.is_floating_point()})


@pytest.mark.parametrize("options", [{"tp": 2}, {"layout": "gguf"}])
def test_layouts_that_cut_tensors_say_to_consolidate_first(folder, tmp_path, options):
    with pytest.raises(OptionError, match="those of the source lie in several parts") as refused:
        bigload.reshard(folder, tmp_path / "out", **options)
    assert f"bigload reshard {folder} CONSOLIDATED" in refused.value.hint
    assert not (tmp_path / "out").exists()


def test_fetch_says_to_reshard(folder, tmp_path):
    with pytest.raises(UnsupportedFormatError, match="fetch copies no distributed checkpoints") as refused:
        bigload.fetch(folder, tmp_path / "out")
    assert "bigload reshard SOURCE OUT" in refused.value.hint
