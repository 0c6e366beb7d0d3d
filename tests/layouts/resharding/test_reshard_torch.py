"""Torch files become device folders of safetensors, byte for byte."""

import pytest
import torch
from safetensors.torch import load_file

import bigload
from bigload.checkpoint.index import encode_index
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import StalePlanError
from bigload.layouts.resharding.preparation import prepare_reshard
from bigload.layouts.resharding.reshard import reshard
from bigload.planning.plan_file import write_plan

BUDGET = {"cuda:0": 12_000, "cpu": 16_000}


def state_dict(blocks: int = 6) -> dict[str, torch.Tensor]:
    embedding = torch.randn(16, 32)
    layers = {
        f"model.layers.{block}.{part}.weight": torch.randn(32, 32).bfloat16()
        for block in range(blocks)
        for part in "ab"
    }
    return {"model.embed_tokens.weight": embedding, **layers, "lm_head.weight": embedding}


def save_sharded(folder, state, num_shards=3):
    folder.mkdir()
    names = list(state)
    weight_map = {}
    for number in range(num_shards):
        file = f"pytorch_model-{number + 1:05}-of-{num_shards:05}.bin"
        own = names[number::num_shards]
        torch.save({name: state[name] for name in own}, folder / file)
        weight_map |= dict.fromkeys(own, file)
    index = encode_index(weight_map, total_size=sum(tensor.nbytes for tensor in state.values()))
    (folder / "pytorch_model.bin.index.json").write_bytes(index)
    return folder


def loaded(out):
    files = out.rglob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_a_sharded_checkpoint_comes_out_byte_for_byte(tmp_path):
    state = state_dict()
    source = save_sharded(tmp_path / "source", state)
    plan = bigload.plan(source, BUDGET, overhead=0)
    assert len(set(plan.device_map.values())) > 1
    write_plan(plan, tmp_path / "plan.json")
    report = reshard(tmp_path / "plan.json", tmp_path / "out")
    assert report.verified
    found = loaded(tmp_path / "out")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in state.items())
    assert open_checkpoint(tmp_path / "out").format == "safetensors"


def test_tied_names_in_one_file_both_come_out(tmp_path):
    state = state_dict()
    torch.save(state, tmp_path / "model.bin")
    tensors = open_checkpoint(tmp_path / "model.bin").tensors
    assert tensors["lm_head.weight"].span == tensors["model.embed_tokens.weight"].span
    prepared = prepare_reshard(bigload.plan(tmp_path / "model.bin", BUDGET, overhead=0), tmp_path / "out")
    assert prepared.stored_bytes >= sum(tensor.nbytes for tensor in state.values())
    reshard(prepared.plan, tmp_path / "out")
    found = loaded(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_saving_the_source_again_with_other_weights_makes_a_plan_stale(tmp_path):
    torch.save({"a.weight": torch.ones(100), "b.weight": torch.ones(2)}, tmp_path / "model.bin")
    plan = bigload.plan(tmp_path / "model.bin", {"cpu": 10_000})
    torch.save({"a.weight": torch.zeros(100), "b.weight": torch.ones(2)}, tmp_path / "model.bin")
    with pytest.raises(StalePlanError):
        reshard(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_view_that_is_not_stored_row_by_row_is_written_row_by_row(tmp_path):
    weight = torch.randn(8, 4)
    torch.save({"a.weight": weight.t(), "b.weight": torch.ones(2)}, tmp_path / "model.bin")
    plan = bigload.plan(tmp_path / "model.bin", {"cpu": 10_000})
    assert plan.total_bytes == weight.nbytes + 8
    reshard(plan, tmp_path / "out")
    written = bigload.load(tmp_path / "out")
    assert torch.equal(written["a.weight"], weight.t())
    assert torch.equal(written["b.weight"], torch.ones(2))
