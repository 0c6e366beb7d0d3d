"""Folders that were written, then uploaded: read by ranges, compared as on a disk, and nothing is written."""

import json
import shutil
import threading
from pathlib import Path

import fsspec
import pytest

import bigload
from bigload.checkpoint import byte_source
from bigload.checkpoint.records.manifest import MANIFEST_FILE
from bigload.errors import AccessDeniedError, DamagedOutputError, ManifestNotFoundError
from builders import make_checkpoint
from hub_server import served_hub

SHARD, FIRST = "model-00002-of-00003.safetensors", "model-00001-of-00003.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    source = make_checkpoint(folder / "source", hidden=256, vocab=8192)
    return bigload.reshard(source, folder / "written", max_shard_bytes=5_000_000).out


@pytest.fixture
def written(original, tmp_path):
    """What a reshard wrote, with a tensor that is larger than a block."""
    return Path(shutil.copytree(original, tmp_path / "written"))


@pytest.fixture(params=["hf", "https", "memory"])
def uploaded(request, tmp_path, monkeypatch, written):
    """Return a function that uploads the folder to a service and returns its address."""
    monkeypatch.setattr(byte_source, "_SCHEMES", {"file": byte_source._FILE})

    def to_memory():
        system = fsspec.filesystem("memory")
        system.store.clear()
        for path in written.rglob("*"):
            if path.is_file():
                system.pipe_file(f"/models/{path.relative_to(written)}", path.read_bytes())
        return "memory://models"

    with served_hub(monkeypatch, tmp_path / "cache") as server:
        ways = {
            "hf": lambda: f"hf://org/tiny@{server.add('org/tiny', written).commit}",
            "https": lambda: server.serve("files", written),
            "memory": to_memory,
        }
        yield ways[request.param]
    fsspec.filesystem("memory").store.clear()


@pytest.fixture
def served(tmp_path, monkeypatch):
    with served_hub(monkeypatch, tmp_path / "cache") as server:
        yield server


def flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_what_was_uploaded_whole_is_in_order(uploaded, written):
    report, local = bigload.verify(uploaded()), bigload.verify(written)
    assert (report.problems, report.warnings, report.manifest) == ((), (), local.manifest)
    assert report.read_bytes == local.manifest.num_bytes


@pytest.mark.parametrize("level", ["full", "size"])
@pytest.mark.sample(3)
def test_differences_are_those_of_the_folder(uploaded, written, level):
    flip(written / SHARD, -10)
    (written / "config.json").write_bytes((written / "config.json").read_bytes() + b" ")
    (written / FIRST).unlink()
    (written / "other.safetensors").write_bytes(b"")
    local, remote = bigload.verify(written, level=level), bigload.verify(uploaded(), level=level)
    assert remote.problems == local.problems
    assert len(local.problems) == (3 if level == "full" else 2)
    with pytest.raises(DamagedOutputError, match=r"://.* is not what was written"):
        remote.check()


def test_a_header_that_is_none_is_a_problem(uploaded, written):
    flip(written / SHARD, 8)
    assert bigload.verify(uploaded()).problems == bigload.verify(written).problems != ()


@pytest.mark.parametrize("uploaded", ["hf"], indirect=True)
@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret"])
def test_names_that_leave_the_folder_are_refused(uploaded, written, name):
    manifest = json.loads((written / MANIFEST_FILE).read_text())
    manifest["files"][name] = {"bytes": 1, "digest": None, "tensors": {}}
    (written / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(DamagedOutputError, match="expected the path of a file inside its folder"):
        bigload.verify(uploaded())


@pytest.mark.parametrize("name", ["..%2Fsecret", "a\\b", "config.json?x=1", "config.json#x", "http://other/x"])
@pytest.mark.sample(5)
def test_names_that_addresses_would_read_otherwise_name_no_other_file(uploaded, written, name):
    manifest = json.loads((written / MANIFEST_FILE).read_text())
    manifest["files"] = {name: {"bytes": 1, "digest": None, "tensors": {}}}
    (written / MANIFEST_FILE).write_text(json.dumps(manifest))
    (written.parent / "secret").write_bytes(b"x")
    try:
        report = bigload.verify(uploaded())
    except DamagedOutputError:
        return
    assert [problem.code for problem in report.problems] in (["missing"], ["unsafe-path"])


@pytest.mark.parametrize("uploaded", ["hf"], indirect=True)
@pytest.mark.parametrize("text", ["", "{", '{"schema": "bigload.manifest/9.0"}'])
def test_a_manifest_that_is_none_is_refused(uploaded, written, text):
    (written / MANIFEST_FILE).write_text(text)
    with pytest.raises(DamagedOutputError, match="not a usable manifest"):
        bigload.verify(uploaded())


def test_a_folder_without_manifest_is_told(uploaded, written):
    (written / MANIFEST_FILE).unlink()
    with pytest.raises(ManifestNotFoundError, match=f"no {MANIFEST_FILE} in it"):
        bigload.verify(uploaded())


def test_of_a_model_of_the_hub_fetch_is_named(served, tmp_path):
    served.add("org/tiny", make_checkpoint(tmp_path / "source", shards=2))
    with pytest.raises(ManifestNotFoundError) as refused:
        bigload.verify("org/tiny")
    assert "SHA-256 of 2 files: bigload fetch hf://org/tiny" in refused.value.hint


def test_a_part_names_the_whole(served, tmp_path):
    source = make_checkpoint(tmp_path / "source", hidden=64)
    served.add("org/ranks", bigload.reshard(source, tmp_path / "ranks", layout="shards").out)
    (tmp_path / "ranks/rank-0").mkdir()
    (tmp_path / "ranks/rank-0/config.json").write_text("{}")
    with pytest.raises(ManifestNotFoundError, match="part of hf://org/ranks@") as refused:
        bigload.verify("org/ranks/rank-0")
    assert "bigload verify hf://org/ranks@" in refused.value.hint


def test_a_repository_that_is_not_there_or_gated(served, written):
    with pytest.raises(ManifestNotFoundError, match="no such repository"):
        bigload.verify("org/nothing")
    served.add("org/tiny", written, gated=True)
    with pytest.raises(AccessDeniedError, match="gated"):
        bigload.verify("org/tiny")


def test_cached_weights_do_not_hide_the_manifest_of_the_service(served, written, tmp_path):
    """`from_pretrained` keeps the weights and no manifest."""
    commit = served.add("org/tiny", written).commit
    folder = tmp_path / "cache/hub/models--org--tiny"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs/main").write_text(commit)
    for path in written.iterdir():
        if path.name != MANIFEST_FILE:
            (snapshot / path.name).write_bytes(path.read_bytes())
    assert bigload.verify("org/tiny").ok


def test_bytes_are_transferred_once_and_few_requests_are_sent(served, written):
    served.add("org/tiny", written)
    assert bigload.verify("org/tiny").ok
    size = sum(path.stat().st_size for path in written.iterdir())
    assert served.num_bytes < size + 400_000
    assert len([request for request in served.requests if request.route == "cdn"]) < 20


def test_as_many_files_as_connections_are_read_at_once(served, tmp_path):
    source = make_checkpoint(tmp_path / "source", blocks=20, hidden=64)
    out = bigload.reshard(source, tmp_path / "out", max_shard_bytes=20_000).out
    served.add("org/tiny", out)
    at_once = threading.Barrier(16, timeout=60)
    left = iter(range(16))
    served.fault("cdn", file=".safetensors", times=16, pause=lambda: next(left, None) is None or at_once.wait())
    assert bigload.verify("org/tiny").ok


@pytest.mark.parametrize("fault", [{"cut_after": 1000}, {"status": 503}], ids=["cut", "503"])
def test_failures_that_pass_change_nothing(served, written, fault):
    served.add("org/tiny", written)
    served.fault("cdn", times=3, **fault)
    assert bigload.verify("org/tiny").ok


def test_a_file_that_cannot_be_read_is_a_problem_of_that_file(served, written):
    served.add("org/tiny", written)
    served.fault("cdn", file=SHARD, times=-1, status=500)
    (problem,) = bigload.verify("org/tiny").problems
    assert (problem.code, problem.file) == ("unreadable", SHARD)


def test_nothing_is_written_beside_the_cache_of_headers(served, written, tmp_path, monkeypatch):
    served.add("org/tiny", written)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    bigload.verify("org/tiny")
    assert not list(Path.cwd().iterdir())
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 300_000
