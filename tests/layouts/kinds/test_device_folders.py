import json
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from strategies import budgets, checkpoints

import bigload
from bigload.checkpoint.source import open_checkpoint
from bigload.dtypes import DTYPES
from bigload.errors import PlanError
from bigload.layouts.dtype_rules import dtype_rule
from bigload.planning.plan_file import check_plan, plan_from_json, read_plan, write_plan
from bigload.planning.planner import plan
from builders import (
    checkpoint_of,
    laid_out,
    llama_config,
    llama_tensors,
    make_checkpoint,
    split,
    stored_tensors,
    write_output,
    write_sharded,
)


def files_of(tensors, budget, **options):
    checkpoint = checkpoint_of(tensors)
    return by_plan(plan(checkpoint, budget, overhead=0), checkpoint, **options).files


def by_plan(made, checkpoint, **options):
    return laid_out("devices", checkpoint, plan=made, **options)


def held(files):
    return {output.file: [tensor.name for tensor in output.tensors] for output in files}


def test_every_device_has_a_folder_and_the_disk_is_called_offload():
    tensors = {f"layers.{index}.proj.weight": 10 for index in range(7)}
    assert held(files_of(tensors, {"cuda:0": 30, "cpu": 30})) == {
        "cuda-0/model-00001-of-00001.safetensors": ["layers.0.proj.weight", "layers.1.proj.weight"],
        "cpu/model-00001-of-00001.safetensors": ["layers.2.proj.weight", "layers.3.proj.weight"],
        "offload/model-00001-of-00001.safetensors": [f"layers.{index}.proj.weight" for index in (4, 5, 6)],
    }


def test_layers_that_get_no_device_are_in_no_file():
    tensors = {"layers.0.a.weight": 4, "layers.1.a.weight": 4, "mtp.a.weight": 1}
    names = [name for names in held(files_of(tensors, {"cpu": 100})).values() for name in names]
    assert names == ["layers.0.a.weight", "layers.1.a.weight"]


def test_a_stored_copy_is_written_beside_what_it_is_a_copy_of():
    table = ("U8", [4, 1])
    tensors = {"embed_tokens.weight": table, "layers.0.a.weight": 4, "layers.1.a.weight": 4, "lm_head.weight": table}
    checkpoint = checkpoint_of(tensors, config=llama_config(tied=True))
    made = plan(checkpoint, {"cuda:0": 8, "cpu": 100}, overhead=0)
    files = held(by_plan(made, checkpoint).files)
    assert set(files["cuda-0/model-00001-of-00001.safetensors"]) == {"embed_tokens.weight", "lm_head.weight"}


def test_tensors_come_in_execution_order_not_in_file_order():
    files = files_of({f"layers.{index}.proj.weight": 64 for index in (10, 2, 1)}, {"cpu": 1000})
    assert list(held(files).values()) == [[f"layers.{index}.proj.weight" for index in (1, 2, 10)]]


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ((4, 4, 4, 8, 1), 8, [[4, 4], [4], [8], [1]]),
        ((50, 2, 2), 8, [[50], [2, 2]]),
        ((2, 50, 2), 8, [[2], [50], [2]]),
        ((2, 2, 50), 8, [[2, 2], [50]]),
        ((4,) * 9, None, [[4] * 9]),
    ],
)
def test_a_file_ends_before_the_tensor_that_would_take_it_past_the_limit(sizes, limit, expected):
    tensors = {f"layers.{index}.proj.weight": size for index, size in enumerate(sizes)}
    files = files_of(tensors, {"cuda:0": 100, "cpu": 100}, max_shard_bytes=limit)  # the cpu needs no file
    assert [[tensor.num_bytes for tensor in output.tensors] for output in files] == expected
    assert [output.file for output in files] == [
        f"cuda-0/model-{index:05d}-of-{len(files):05d}.safetensors" for index in range(1, len(files) + 1)
    ]


def test_tensors_of_odd_sizes_come_last_and_wide_types_first_among_them():
    tensors = {
        "layers.0.proj.scale": ("F8_E4M3", [3]),
        "layers.1.proj.weight": ("F32", [2]),
        "layers.2.proj.weight": ("BF16", [1]),
        "layers.3.proj.weight": ("F8_E4M3", [128]),
    }
    (output,) = files_of(tensors, {"cpu": 1000})
    assert [tensor.num_bytes for tensor in output.tensors] == [128, 8, 2, 3]


def test_each_folder_maps_its_own_tensors_and_the_root_maps_all_and_is_written_last():
    checkpoint = checkpoint_of({f"layers.{index}.proj.weight": 10 for index in range(4)})
    output = by_plan(plan(checkpoint, {"cuda:0": 60, "cpu": 20}, overhead=0), checkpoint, max_shard_bytes=10)
    maps = {
        path.removesuffix("model.safetensors.index.json"): json.loads(text)["weight_map"]
        for path, text in output.documents.items()
        if path.endswith(".index.json")
    }
    assert list(maps)[-1] == ""
    assert maps.keys() == {"", *(f"{written.folder}/" for written in output.files)}
    for written in output.files:
        folder, _, name = written.file.rpartition("/")
        for tensor in written.tensors:
            assert (maps[""][tensor.name], maps[f"{folder}/"][tensor.name]) == (written.file, name)
    assert len(maps[""]) == 4 == sum(len(names) for folder, names in maps.items() if folder)


@given(checkpoint=checkpoints(), budget=budgets(), max_shard_bytes=st.none() | st.integers(1, 40))
def test_every_placed_tensor_is_once_on_its_device_and_the_plan_inside_is_one(checkpoint, budget, max_shard_bytes):
    try:
        made = plan(checkpoint, budget, overhead=0)
    except PlanError:
        return
    output = by_plan(made, checkpoint, max_shard_bytes=max_shard_bytes)
    placed = [(tensor.name, written.folder) for written in output.files for tensor in written.tensors]
    wanted = [(name, made.device_of(name).folder) for name in checkpoint.tensors if not made.leaves_out(name)]
    assert sorted(placed) == sorted(wanted)
    inside = plan_from_json(output.documents["plan.json"].decode())
    assert (inside.homes, inside.left_out, inside.checkpoint_path) == (made.homes, (), ".")
    assert {shard.file: shard.num_bytes for shard in inside.shards} == {
        file.file: file.num_bytes for file in output.files
    }


def test_the_plan_inside_is_a_plan_for_the_folder_it_is_in(tmp_path):
    shards = split({**llama_tensors(), "mtp.proj.weight": ("BF16", [8])}, 2)
    source = write_sharded(tmp_path / "source", shards, config=llama_config())
    checkpoint = open_checkpoint(source)
    made = plan(checkpoint, {"cuda:0": 3000, "cpu": 2500}, overhead=0)
    assert made.left_out
    out = write_output(by_plan(made, checkpoint, max_shard_bytes=1500), source, tmp_path / "out")
    inside, opened = read_plan(out / "plan.json"), open_checkpoint(out)
    check_plan(inside, opened)
    assert inside.checkpoint_path == str(out)
    assert inside.total_bytes == opened.total_bytes == checkpoint.total_bytes - 16
    assert [use.weights_bytes for use in inside.devices] == [use.weights_bytes for use in made.devices]
    assert not any(note.code == "left-out" for note in inside.notes)


@pytest.mark.skipif(not hasattr(dcp, "HuggingFaceStorageReader"), reason="torch 2.6 has none")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_reader_of_safetensors_finds_the_tensors_of_a_devices_folder_and_of_shards(tmp_path):
    """It lists a folder and looks for no index, so the output itself has none for it, as the documents say."""
    source = make_checkpoint(tmp_path / "source", dtype="F32")
    out, whole = tmp_path / "out", tmp_path / "whole"
    bigload.reshard(plan(source, {"cpu": 4000}, overhead=0), out)
    bigload.reshard(source, whole, layout="shards")
    assert dcp.HuggingFaceStorageReader(str(out)).read_metadata().state_dict_metadata == {}
    found = set()
    for folder in (out / "cpu", out / "offload", whole):
        expected = dict(bigload.load(folder))
        state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        found |= expected.keys() if folder != whole else set()
    assert found == bigload.load(whole).keys() == open_checkpoint(source).tensors.keys()


def test_the_folder_is_loaded_by_the_plan_inside(tmp_path):
    source = make_checkpoint(tmp_path / "source")
    checkpoint = open_checkpoint(source)
    made = plan(checkpoint, {"cpu": 4000}, overhead=0)
    out = write_output(by_plan(made, checkpoint), source, tmp_path / "out")
    loaded = bigload.load(out, device=read_plan(out / "plan.json"))
    there = {name for name in checkpoint.tensors if made.device_of(name).kind == "cpu"}
    assert loaded.keys() == there != checkpoint.tensors.keys()
    stored = stored_tensors(*source.glob("*.safetensors"))
    assert all(bytes(loaded[name].view(torch.uint8).flatten().tolist()) == stored[name][2] for name in there)


def test_the_plan_inside_counts_what_a_cast_leaves(tmp_path):
    source = make_checkpoint(tmp_path / "source", dtype="F32")
    checkpoint, narrow = open_checkpoint(source), DTYPES["BF16"]
    made = plan(checkpoint, {"cuda:0": 3000, "cpu": 2500}, overhead=0, dtype=narrow)
    output = by_plan(made, checkpoint, dtypes=dtype_rule(narrow))
    out = write_output(output, source, tmp_path / "out")
    inside, opened = read_plan(out / "plan.json"), open_checkpoint(out)
    check_plan(inside, opened)
    assert inside.total_bytes == opened.total_bytes == checkpoint.total_bytes // 2
    assert inside.devices == made.devices


def test_a_plan_for_a_dot_that_lies_elsewhere_means_the_working_folder_as_before(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(make_checkpoint(tmp_path / "source"))
    made = plan(checkpoint, {"cpu": 10**6}, overhead=0)
    write_plan(replace(made, checkpoint_path="."), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").checkpoint_path == "."
