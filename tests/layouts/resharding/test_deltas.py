"""Deltas: checkpoints that store only what differs from another one."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import save_file

import bigload
from bigload.checkpoint.records.delta import DELTA_FILE
from bigload.errors import DamagedOutputError, InvalidCheckpointError, ManifestNotFoundError, OptionError

CONFIG = '{"model_type": "x"}'


def make(folder, tensors, *, form="safetensors"):
    folder.mkdir()
    if form == "safetensors":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(CONFIG)
    return folder


@pytest.fixture
def base_tensors():
    generator = torch.Generator().manual_seed(1)
    return {f"layers.{n}.weight": torch.randn(16, 12, generator=generator).bfloat16() for n in range(5)}


@pytest.fixture
def tuned_tensors(base_tensors):
    tuned = {name: tensor.clone() for name, tensor in base_tensors.items()}
    tuned["layers.1.weight"] += 1
    tuned["layers.3.weight"] = torch.zeros(3, 3)
    return tuned | {"new": torch.ones(4)}


@pytest.fixture(params=["safetensors", "torch"])
def base(request, tmp_path, base_tensors):
    folder = make(tmp_path / "base", base_tensors, form=request.param)
    bigload.write_manifest(folder)
    return folder


@pytest.fixture
def tuned(tmp_path, tuned_tensors):
    return make(tmp_path / "tuned", tuned_tensors)


@pytest.fixture
def delta(base, tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bigload.reshard(tuned, "delta", base="base")
    return tmp_path / "delta"


def flip(path, position):
    state = path.stat()
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a disk does it


def test_only_what_differs_is_written_and_all_of_it_is_read(delta, tuned, tuned_tensors):
    opened = bigload.open_checkpoint(delta)
    own = {name for name, tensor in opened.tensors.items() if tensor.span.file.startswith("delta-")}
    assert own == {"layers.1.weight", "layers.3.weight", "new"}
    for verify in (False, True):
        loaded = bigload.load(delta, verify=verify)
        assert loaded.keys() == tuned_tensors.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tuned_tensors.items())
    assert bigload.diff(delta, tuned).is_equal
    assert bigload.diff(delta, tuned, trust_digests=False).is_equal
    report = bigload.verify(delta)
    assert report.ok
    assert len(report.base_files) == 1
    assert bigload.plan(delta, {"cpu": "1GiB"}).checkpoint_path == str(delta)


def test_a_delta_is_written_whole_again(delta, tuned, tmp_path):
    bigload.reshard(delta, tmp_path / "whole", layout="shards")
    assert not (tmp_path / "whole" / DELTA_FILE).exists()
    shutil.rmtree(tmp_path / "base")
    assert bigload.diff(tmp_path / "whole", tuned).is_equal


def test_the_description_is_what_its_schema_says(delta):
    schemas = Path(__file__).parents[3] / "docs" / "schemas"
    schema = json.loads((schemas / "delta-1.0.json").read_text())
    document = json.loads((delta / DELTA_FILE).read_text())
    Draft202012Validator(schema).validate(document)
    assert set(document) == set(schema["properties"])


def test_nothing_in_the_folder_looks_like_a_model(delta):
    names = {path.name for path in delta.iterdir()}
    weights = {name for name in names if "safetensors" in name}
    assert weights == {"delta-00001-of-00001.safetensors"}
    (delta / DELTA_FILE).unlink()  # as for a reader that does not know it
    with pytest.raises(bigload.CheckpointNotFoundError, match="no index"):
        bigload.open_checkpoint(delta)


def test_both_may_be_moved_together_where_the_base_was_named_relatively(delta, tmp_path, tuned_tensors):
    (tmp_path / "there").mkdir()
    delta.rename(tmp_path / "there" / "delta")
    (tmp_path / "base").rename(tmp_path / "there" / "base")
    assert torch.equal(bigload.load(tmp_path / "there" / "delta")["new"], tuned_tensors["new"])


def test_a_base_that_is_gone_is_an_error_that_names_it(delta, tmp_path):
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(InvalidCheckpointError, match=r"its base \.\./base is not at"):
        bigload.open_checkpoint(delta)
    assert {problem.code for problem in bigload.verify(delta).problems} == {"missing"}
    text = (delta / DELTA_FILE).read_text().replace('"../base"', f'"{tmp_path}/elsewhere"')
    (delta / DELTA_FILE).write_text(text)
    assert len(bigload.load(delta)) == 6


def test_another_version_of_the_base_is_an_error_that_names_it(delta, tmp_path, base_tensors, base):
    (path,) = [path for path in base.iterdir() if path.suffix in (".safetensors", ".bin")]
    changed = {name: tensor + 1 for name, tensor in base_tensors.items()}
    save_file(changed, path, metadata={"format": "pt"}) if path.suffix == ".safetensors" else torch.save(changed, path)
    os.utime(path, ns=((base / "bigload-manifest.json").stat().st_mtime_ns + 10**9,) * 2)
    with pytest.raises(InvalidCheckpointError, match="base") as caught:
        bigload.open_checkpoint(delta)
    assert str(tmp_path / "delta" / ".." / "base") in str(caught.value)
    bigload.write_manifest(base, force=True)
    with pytest.raises(InvalidCheckpointError, match="base"):
        bigload.load(delta)


def test_a_copy_without_its_times_is_confirmed_by_a_manifest(delta, base):
    (path,) = [path for path in base.iterdir() if path.suffix in (".safetensors", ".bin")]
    manifest = base / "bigload-manifest.json"
    os.utime(manifest, ns=(path.stat().st_mtime_ns - 10**9,) * 2)
    with pytest.raises(InvalidCheckpointError, match="written to after the manifest of the base"):
        bigload.open_checkpoint(delta)
    assert bigload.write_manifest(base).is_written
    assert len(bigload.load(delta)) == 6


def test_damage_of_the_base_is_found_by_what_reads_it_with_digests(delta, base):
    (path,) = [path for path in base.iterdir() if path.suffix in (".safetensors", ".bin")]
    flip(path, bigload.open_checkpoint(base).tensors["layers.0.weight"].span.start)
    with pytest.raises(DamagedOutputError, match=r"layers\.0\.weight"):
        bigload.load(delta, verify=True)
    (problem,) = bigload.verify(delta).problems
    assert (problem.file, problem.tensor) == (f"../base/{path.name}", "layers.0.weight")


def test_a_transform_of_the_base_is_a_delta_of_it(base, tmp_path, base_tensors):
    rename = bigload.Rename("layers.4", "last")
    bigload.reshard(base, tmp_path / "out", transforms=[rename], base=str(base))
    assert json.loads((tmp_path / "out" / DELTA_FILE).read_text())["base"]["path"] == str(base)
    loaded = bigload.load(tmp_path / "out")
    assert torch.equal(loaded["last.weight"], base_tensors["layers.4.weight"])
    assert len(loaded) == 5


def test_what_cannot_be_a_delta_is_refused_before_anything_is_written(base, tuned, tmp_path, delta):
    out = tmp_path / "out"
    for options, words in (
        ({"dtype": "fp32"}, "no cast"),
        ({"layout": "offload"}, "the layout shards"),
        ({"metadata": {"a": "b"}}, "no cast"),
    ):
        with pytest.raises(OptionError, match=words):
            bigload.reshard(tuned, out, base=base, **options)
    with pytest.raises(OptionError, match="no tensor differs"):
        bigload.reshard(base, out, base=base)
    with pytest.raises(InvalidCheckpointError, match="nor a delta"):
        bigload.reshard(tuned, out, base=delta)
    (base / "bigload-manifest.json").unlink()
    with pytest.raises(ManifestNotFoundError, match="no manifest of"):
        bigload.reshard(tuned, out, base=base)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"files": ["../tuned/model.safetensors"]}, "no file of a delta"),
        ({"tensors": {"other": "0" * 32}}, "no tensor 'other'"),
        ({"tensors": {"layers.0.weight": "0" * 32}}, "another one than when the delta was written"),
        ({"tensors": {"layers.0.weight": 3}}, "no digest"),
        ({"schema": "bigload.delta/2.0"}, "version 2.0"),
        ({"base": {"path": "../base", "shards": [3]}}, "expected an object"),
        ({"base": 3}, "not a usable description"),
    ],
    ids=str,
)
@pytest.mark.parametrize("base", ["safetensors"], indirect=True)
def test_a_wrong_description_is_an_error(delta, change, words):
    document = json.loads((delta / DELTA_FILE).read_text())
    (delta / DELTA_FILE).write_text(json.dumps(document | change))
    with pytest.raises(InvalidCheckpointError, match=words):
        bigload.open_checkpoint(delta)
