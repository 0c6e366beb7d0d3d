"""A folder of ranks is read by its own division, by another one, and by another number of ranks, as the whole was."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.errors import InvalidCheckpointError, StateDictMismatchError
from bigload.parallel.sharded_loading.stored_tensors import open_stored
from bigload.planning.tensor_parallel.division import Division

CONFIG = '{"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "head_dim": 2}'
ATTENTION = "model.layers.0.self_attn."
SHAPES = {
    **{f"{ATTENTION}q_proj.weight": (8, 8), f"{ATTENTION}k_proj.weight": (4, 8), f"{ATTENTION}o_proj.weight": (8, 8)},
    **{f"model.layers.0.mlp.{name}_proj.weight": (16, 8) for name in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.norm.weight": (8,),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(CONFIG)
    return folder, tensors


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_was_divided_is_read_as_a_whole(whole, tmp_path, tp):
    folder, tensors = whole
    bigload.reshard(folder, tmp_path / "out", layout="ranks", tp=tp)
    loaded = bigload.load_parts(tmp_path / "out", dict.fromkeys(SHAPES, Division()), 0)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(("stored", "wanted"), [(2, 2), (2, 4), (4, 2)])
def test_ranks_read_their_parts_of_what_others_have_divided(whole, tmp_path, stored, wanted):
    folder, tensors = whole
    bigload.reshard(folder, tmp_path / "out", layout="ranks", tp=stored)
    for rank in range(wanted):
        half = tuple((((number * 8) // wanted, (number + 1) * 8 // wanted),) for number in range(wanted))
        name = f"{ATTENTION}q_proj.weight"
        loaded = bigload.load_parts(tmp_path / "out", {name: Division(0, half)}, rank)
        start, stop = half[rank][0]
        assert torch.equal(loaded[name], tensors[name][start:stop])


def test_each_rank_reads_its_own_file_and_nothing_else(whole, tmp_path):
    folder, _ = whole
    bigload.reshard(folder, tmp_path / "out", layout="ranks", tp=2)
    divisions = bigload.read_ranks(tmp_path / "out").divisions
    for rank in range(2):
        report = bigload.load_parts(tmp_path / "out", divisions, rank).report
        held = bigload.open_checkpoint(tmp_path / "out" / f"rank-{rank}").total_bytes
        assert report.read_bytes == report.needed_bytes == held


def test_every_element_is_there_once_where_ranks_hold_the_same(whole, tmp_path):
    folder, tensors = whole
    bigload.reshard(folder, tmp_path / "out", layout="ranks", tp=4)  # 2 heads of keys among 4 ranks
    stored = open_stored(tmp_path / "out").tensors[f"{ATTENTION}k_proj.weight"]
    assert sum(piece.tensor.num_elements for piece in stored.pieces) == tensors[stored.name].numel()


def test_columns_in_several_ranges_are_refused(whole, tmp_path):
    folder, _ = whole
    bigload.reshard(
        folder,
        tmp_path / "out",
        layout="ranks",
        tp=2,
        tp_rules={"mlp.down_proj": "packed_rowwise", "q_proj": "colwise"},
    )
    with pytest.raises(InvalidCheckpointError, match="several ranges of its dimension 1"):
        open_stored(tmp_path / "out")


STAGED = {
    **SHAPES,
    **{name.replace("layers.0", "layers.1"): shape for name, shape in SHAPES.items() if "layers" in name},
    "model.embed_tokens.weight": (12, 8),
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    tensors = {name: torch.randn(shape) for name, shape in STAGED.items()}
    save_file(tensors, folder / "model.safetensors")
    tied = {**json.loads(CONFIG), "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(tied))
    bigload.reshard(folder, folder / ".." / "staged.out", tp=2, pp=2)
    return folder / ".." / "staged.out", tensors


class Layers(nn.Module):
    """Parameters under the names of a checkpoint, on the meta device."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, nn.Parameter(torch.empty(shape, device="meta")))


def test_what_stages_hold_is_read_as_a_whole(staged):
    folder, tensors = staged
    whole = Layers(STAGED)
    bigload.load_sharded(whole, folder)
    assert all(torch.equal(value, tensors[name]) for name, value in whole.state_dict().items())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_model_of_one_stage_reads_the_folders_of_its_ranks(staged, stage):
    folder, tensors = staged
    held = bigload.read_ranks(folder).stage(stage)
    assert "model.embed_tokens.weight" in held.shapes, "the head of the last stage is the embedding"
    for rank in range(2):
        own = {name: division.shape(held.shapes[name], rank) for name, division in held.divisions.items()}
        part = Layers(own)
        (report,) = bigload.load_sharded(part, held, divisions=held.divisions, rank=rank)
        folder_bytes = held.checkpoint(stage * 2 + rank).total_bytes
        assert report.needed_bytes == report.read_bytes == folder_bytes
        for name, value in part.state_dict().items():
            dim = held.divisions[name].dim
            assert torch.equal(value, tensors[name] if dim is None else tensors[name].chunk(2, dim)[rank])


def test_a_model_of_one_stage_lacks_what_others_hold(staged):
    folder, _ = staged
    with pytest.raises(StateDictMismatchError):
        bigload.load_sharded(Layers(bigload.read_ranks(folder).stage(0).shapes), folder)
