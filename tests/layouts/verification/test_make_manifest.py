"""A manifest of a checkpoint that is there already."""

import hashlib
import json
import os
import time

import pytest
import torch

import bigload
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.errors import (
    CheckpointNotFoundError,
    DamagedOutputError,
    InvalidCheckpointError,
    OutputExistsError,
    UnsupportedFormatError,
    WriteError,
)
from bigload.layouts.verification import make_manifest
from builders import digest_of, write_shard

SPECS = {"embed": ("BF16", [6, 5]), "nothing": ("F32", [0, 3]), "head": ("U8", [7])}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    (made / "extra").mkdir(parents=True)
    write_shard(made / "model.safetensors", SPECS)
    (made / "config.json").write_text("{}")
    (made / "extra" / "notes.txt").write_text("notes")
    (made / ".git").mkdir()
    (made / ".git" / "HEAD").write_text("ref")
    return made


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def blob_sha1(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def test_every_file_and_tensor_is_in_it_and_hidden_ones_are_not(folder):
    report = bigload.write_manifest(folder)
    assert report.is_written
    assert set(report.manifest.files) == {"model.safetensors", "config.json", "extra/notes.txt"}
    record = report.manifest.files["model.safetensors"]
    content = (folder / "model.safetensors").read_bytes()
    assert record.digest == digest_of(content)
    for name, tensor in bigload.open_checkpoint(folder).tensors.items():
        assert record.tensors[name] == digest_of(content[tensor.span.start : tensor.span.stop])
    verified = bigload.verify(folder)
    assert verified.ok
    assert verified.num_tensors == 3


def test_it_is_the_manifest_that_a_reshard_would_write_but_for_what_it_came_from(folder, tmp_path):
    bigload.reshard(folder, tmp_path / "out", layout="shards")
    written = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    (tmp_path / "out" / MANIFEST_FILE).unlink()
    bigload.write_manifest(tmp_path / "out")
    made = json.loads((tmp_path / "out" / MANIFEST_FILE).read_text())
    assert made["files"] == written["files"]
    assert (made["layout"], made["options"]) == ("files", {})


def test_damage_after_it_is_found_down_to_the_tensor(folder):
    bigload.write_manifest(folder)
    span = bigload.open_checkpoint(folder).tensors["head"].span
    flip(folder / "model.safetensors", span.start)
    (problem,) = bigload.verify(folder).problems
    assert (problem.file, problem.tensor) == ("model.safetensors", "head")


def test_tensors_of_torch_files_have_digests_unless_they_share_some_of_their_bytes(tmp_path):
    whole = torch.arange(64.0).reshape(8, 8)
    tensors = {"whole": whole, "tied": whole, "rows": whole[2:4], "other": torch.ones(3)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    record = bigload.write_manifest(tmp_path).manifest.files["pytorch_model.bin"]
    assert record.tensors["whole"] == record.tensors["tied"] == digest_of(whole.numpy().tobytes())
    assert record.tensors["rows"] is None
    place = bigload.open_checkpoint(tmp_path).tensors["other"].span.start
    assert bigload.verify(tmp_path).ok
    flip(tmp_path / "pytorch_model.bin", place)
    assert [problem.tensor for problem in bigload.verify(tmp_path).problems] == ["other"]


def test_an_equal_one_is_left_and_one_that_differs_is_replaced_only_by_force(folder):
    bigload.write_manifest(folder)
    before = (folder / MANIFEST_FILE).stat()
    assert not bigload.write_manifest(folder).is_written
    assert (folder / MANIFEST_FILE).stat().st_mtime_ns == before.st_mtime_ns
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "new.txt").touch()
    with pytest.raises(OutputExistsError) as caught:
        bigload.write_manifest(folder)
    assert caught.value.details == ("config.json: 8 bytes, the manifest says 2", "new.txt: not in the manifest")
    assert (folder / MANIFEST_FILE).stat().st_ino == before.st_ino
    assert bigload.write_manifest(folder, force=True).is_written
    assert bigload.verify(folder).ok


def test_digests_of_tensors_are_added_to_the_manifest_of_a_fetch(folder, tmp_path):
    bigload.fetch(folder, tmp_path / "copy")
    before = json.loads((tmp_path / "copy" / MANIFEST_FILE).read_text())
    report = bigload.write_manifest(tmp_path / "copy")
    after = json.loads((tmp_path / "copy" / MANIFEST_FILE).read_text())
    assert report.is_written
    assert before["files"]["model.safetensors"].pop("tensors") == {}
    assert set(after["files"]["model.safetensors"].pop("tensors")) == set(SPECS)
    assert after == before


def test_what_is_no_manifest_is_replaced_only_by_force(folder):
    (folder / MANIFEST_FILE).write_text("{")
    with pytest.raises(OutputExistsError, match="not a usable manifest"):
        bigload.write_manifest(folder)
    assert bigload.write_manifest(folder, force=True).is_written


def test_it_may_lie_elsewhere_where_verify_reads_it(folder, tmp_path):
    out = tmp_path / "model.manifest.json"
    bigload.write_manifest(folder, out)
    assert not (folder / MANIFEST_FILE).exists()
    assert bigload.verify(folder, manifest=out).ok
    flip(folder / "config.json", 0)
    assert not bigload.verify(folder, manifest=out).ok


def test_a_folder_that_cannot_be_written_to_is_found_out_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root
    monkeypatch.setattr(make_manifest, "digest_file", lambda *_: pytest.fail("it was read"))
    with pytest.raises(WriteError) as caught:
        bigload.write_manifest(folder)
    assert "-o FILE" in caught.value.hint


def make_cache(tmp_path, folder):
    repository = tmp_path / "models--org--model"
    snapshot = repository / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    weights, config = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()
    for name, content, blob in (
        ("model.safetensors", weights, hashlib.sha256(weights).hexdigest()),
        ("config.json", config, blob_sha1(config)),
    ):
        (repository / "blobs" / blob).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_a_snapshot_of_the_cache_is_compared_with_the_names_of_its_blobs(folder, tmp_path):
    snapshot = make_cache(tmp_path, folder)
    report = bigload.write_manifest(snapshot)
    assert set(report.compared) == {"model.safetensors", "config.json"}
    assert report.manifest.options["versions"]["config.json"] == ["c" * 40, blob_sha1(b"{}")]
    assert bigload.verify(snapshot).ok


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_blob_that_is_not_what_its_name_says_is_an_error_and_no_manifest_is_written(folder, tmp_path, name):
    snapshot = make_cache(tmp_path, folder)
    flip(snapshot / name, -1)
    with pytest.raises(DamagedOutputError) as caught:
        bigload.write_manifest(snapshot)
    (problem,) = caught.value.problems
    assert problem.file == name
    assert not (snapshot / MANIFEST_FILE).exists()


def test_a_download_to_a_folder_is_compared_unless_a_file_was_changed_since(folder):
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        content = (folder / name).read_bytes()
        etag = hashlib.sha256(content).hexdigest() if name == "model.safetensors" else blob_sha1(content)
        (notes / f"{name}.metadata").write_text(f"{'c' * 40}\n{etag}\n{time.time()}\n")
    assert set(bigload.write_manifest(folder).compared) == {"model.safetensors", "config.json"}
    (folder / "config.json").write_text('{"edited": true}')
    os.utime(folder / "config.json", (time.time() + 60,) * 2)
    assert bigload.write_manifest(folder, force=True).compared == ("model.safetensors",)
    state = (folder / "model.safetensors").stat()
    flip(folder / "model.safetensors", -1)  # as a disk would: the time of the file is the same
    os.utime(folder / "model.safetensors", ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(DamagedOutputError, match="not what the Hub has"):
        bigload.write_manifest(folder, force=True)


def test_a_link_out_of_the_folder_is_an_error(folder, tmp_path):
    (tmp_path / "elsewhere.txt").touch()
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    with pytest.raises(InvalidCheckpointError, match=r"link\.txt"):
        bigload.write_manifest(folder)


def test_only_folders_of_checkpoints_have_one(tmp_path, folder):
    with pytest.raises(CheckpointNotFoundError):
        bigload.write_manifest(tmp_path)
    with pytest.raises(UnsupportedFormatError, match="folder on this machine"):
        bigload.write_manifest(folder / "model.safetensors")
