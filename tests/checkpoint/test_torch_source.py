"""Folders, indexes and caches of torch files are found as transformers finds them."""

import os
from pathlib import Path

import pytest
import torch

from bigload.checkpoint.index import encode_index
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import CheckpointNotFoundError, InvalidCheckpointError
from builders import write_shard

ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
INDEX = "pytorch_model.bin.index.json"


def save(path: Path, *names: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: torch.ones(2) for name in names}, path)
    return path


def save_sharded(folder: Path, *, index: str = INDEX, total_size: int = 24) -> Path:
    save(folder / ONE, "a", "b")
    save(folder / TWO, "c")
    weight_map = {"a": ONE, "b": ONE, "c": TWO}
    (folder / index).write_bytes(encode_index(weight_map, total_size=total_size))
    return folder


def problems(path: Path) -> list[tuple[str, str]]:
    with pytest.raises(InvalidCheckpointError) as caught:
        open_checkpoint(path)
    return [(problem.code, problem.file) for problem in caught.value.problems]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "consolidated.00.pth", "weights.pt"])
def test_a_torch_file_opens_by_itself_and_by_its_folder(tmp_path, name):
    save(tmp_path / name, "a")
    for path in (tmp_path, tmp_path / name):
        checkpoint = open_checkpoint(path)
        assert (checkpoint.format, list(checkpoint.tensors)) == ("torch", ["a"])


def test_pytorch_model_is_the_checkpoint_among_the_files_of_a_training(tmp_path):
    for name in ("optimizer.pt", "training_args.bin", "rng_state.pth"):
        (tmp_path / name).touch()
    save(tmp_path / "pytorch_model.bin", "a")
    assert list(open_checkpoint(tmp_path).tensors) == ["a"]


@pytest.mark.parametrize("index", [INDEX, "adapter.bin.index.json"])
def test_an_index_of_torch_files_opens_by_itself_and_by_its_folder(tmp_path, index):
    save_sharded(tmp_path, index=index)
    for path in (tmp_path, tmp_path / index):
        checkpoint = open_checkpoint(path)
        assert checkpoint.index_file == index
        assert [(shard.file, shard.format) for shard in checkpoint.shards] == [(ONE, "torch"), (TWO, "torch")]
        assert (set(checkpoint.tensors), checkpoint.warnings) == ({"a", "b", "c"}, ())


def test_safetensors_come_before_torch_files(tmp_path):
    save_sharded(tmp_path)
    save(tmp_path / "pytorch_model.bin", "old")
    write_shard(tmp_path / "model.safetensors", {"new": ("U8", [1])})
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.format, list(checkpoint.tensors)) == ("safetensors", ["new"])


def test_one_torch_file_comes_before_an_index_of_them(tmp_path):
    save_sharded(tmp_path)
    save(tmp_path / "pytorch_model.bin", "whole")
    assert list(open_checkpoint(tmp_path).tensors) == ["whole"]


def test_an_index_may_name_files_of_both_formats(tmp_path):
    save(tmp_path / ONE, "a")
    write_shard(tmp_path / "b.safetensors", {"b": ("U8", [1])})
    (tmp_path / INDEX).write_bytes(encode_index({"a": ONE, "b": "b.safetensors"}, total_size=9))
    assert open_checkpoint(tmp_path).format == "mixed"


def test_one_shard_of_many_is_no_checkpoint(tmp_path):
    save(tmp_path / ONE, "a")
    with pytest.raises(CheckpointNotFoundError, match=r"no index \(pytorch_model\.bin\.index\.json\)"):
        open_checkpoint(tmp_path)


def test_shards_that_lack_their_index_are_missed_and_not_what_a_training_left_beside_them(tmp_path):
    write_shard(tmp_path / "model-00001-of-00002.safetensors", {"a": ("U8", [1])})
    save(tmp_path / "training_args.bin", "a")
    with pytest.raises(CheckpointNotFoundError, match=r"1 \.safetensors file but no index"):
        open_checkpoint(tmp_path)


def cut_off_and_gone(folder):
    (folder / ONE).write_bytes((folder / ONE).read_bytes()[:-30])
    (folder / TWO).unlink()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (cut_off_and_gone, [("file-truncated", ONE), ("missing-shard", TWO)]),
        (lambda folder: save(folder / TWO, "d"), [("tensor-missing", TWO), ("tensor-unlisted", TWO)]),
        (lambda folder: save(folder / TWO, "c", "a"), [("tensor-twice", TWO)]),
    ],
)
def test_what_is_wrong_with_the_files_of_an_index_is_told(tmp_path, change, found):
    change(save_sharded(tmp_path))
    assert problems(tmp_path) == found


@pytest.mark.parametrize(
    ("put", "code"), [(lambda path: path.symlink_to("blob"), "missing-shard"), (os.mkfifo, "not-a-file")]
)
def test_what_is_no_file_is_told(tmp_path, put, code):
    put(tmp_path / "pytorch_model.bin")
    assert problems(tmp_path) == [(code, "pytorch_model.bin")]


@pytest.mark.parametrize(("total_size", "num_warnings"), [(16, 0), (8, 0), (12, 1)])
def test_tied_weights_may_count_once_or_twice_in_an_index(tmp_path, total_size, num_warnings):
    weight = torch.ones(2)
    torch.save({"a": weight, "b": weight}, tmp_path / ONE)
    (tmp_path / INDEX).write_bytes(encode_index({"a": ONE, "b": ONE}, total_size=total_size))
    assert len(open_checkpoint(tmp_path).warnings) == num_warnings


def test_bytes_that_tensors_share_are_stored_once(tmp_path):
    whole = torch.ones(100)
    torch.save({"a": whole, "b": whole, "c": whole[40:90], "d": torch.ones(3)}, tmp_path / "x.pt")
    checkpoint = open_checkpoint(tmp_path / "x.pt")
    assert checkpoint.total_bytes == 4 * (100 + 100 + 50 + 3)
    assert checkpoint.stored_bytes == 4 * (100 + 3)


def test_a_repository_of_torch_files_opens_by_name_from_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    home = tmp_path / "models--org--old"
    snapshot = save_sharded(home / "snapshots" / ("0" * 40))
    (home / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = home / "blobs" / f"{number:064x}"  # without the suffix that tells the format
        file.rename(blob)
        file.symlink_to(Path("../../blobs") / blob.name)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    assert set(open_checkpoint("org/old").tensors) == {"a", "b", "c"}
