"""A fetch brings the bytes of the source: all of them, or those of names, of a device or of a rank."""

import errno
import hashlib
import json
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

import bigload
from bigload.checkpoint.records.manifest import MANIFEST_FILE, read_manifest
from bigload.checkpoint.records.part import PART_FILE
from bigload.checkpoint.source import open_checkpoint
from bigload.checkpoint.sources import hub
from bigload.errors import (
    AccessDeniedError,
    NotEnoughSpaceError,
    OptionError,
    OutputExistsError,
    ReadError,
    StalePlanError,
    StateDictMismatchError,
    WriteError,
)
from bigload.layouts.fetching.fetch import prepare_fetch
from bigload.layouts.fetching.options import FetchOptions
from bigload.layouts.resharding import output_place
from bigload.machine.files.cache_folder import cache_folder
from builders import contents


def fetched_files(folder):
    return {name: content for name, content in contents(folder).items() if name != MANIFEST_FILE}


def body_bytes(server):
    """Bytes of files that the server has sent, without those of questions about the repository."""
    return sum(request.num_bytes for request in server.requests if request.route != "api")


def test_a_whole_model_comes_byte_for_byte_and_verifies(served, repository, model, tmp_path):
    report = bigload.fetch("org/tiny", tmp_path / "out")
    assert fetched_files(tmp_path / "out") == contents(model)
    assert bigload.verify(tmp_path / "out").ok
    assert (report.part, report.num_hashed, report.kept_bytes) == (None, 3, 0)
    assert report.fetched_bytes == sum(map(len, contents(model).values()))
    recorded = read_manifest(tmp_path / "out").options
    assert recorded["source"] == f"hf://org/tiny@{repository.commit}"
    assert recorded["versions"]["README.md"][0] == repository.commit
    assert open_checkpoint(tmp_path / "out").warnings == open_checkpoint(model).warnings
    assert not (tmp_path / "out.partial").exists()


def test_a_local_folder_is_copied_alike(model, tmp_path):
    report = bigload.fetch(model, tmp_path / "out")
    assert fetched_files(tmp_path / "out") == contents(model)
    assert report.num_hashed == 0


def test_without_a_name_the_folder_is_called_like_the_model(served, repository, tmp_path, model):
    assert bigload.fetch("org/tiny").out == Path("tiny")
    assert fetched_files(tmp_path / "tiny") == contents(model)


def test_what_was_fetched_is_not_fetched_again(served, repository, tmp_path):
    bigload.fetch("org/tiny", tmp_path / "out")
    served.requests.clear()
    report = bigload.fetch("org/tiny", tmp_path / "out")
    assert (report.fetched_bytes, body_bytes(served)) == (0, 0)
    with pytest.raises(OutputExistsError, match="it exists"):
        bigload.fetch("org/tiny", tmp_path / "out", only="lm_head")


def test_another_commit_replaces_an_older_one_only_if_asked(served, repository, model, tmp_path):
    bigload.fetch(f"org/tiny@{repository.commit}", tmp_path / "out")
    repository.refs["main"] = repository.commit = "f" * 40
    (model / "README.md").write_text("new")
    with pytest.raises(OutputExistsError, match="it exists") as caught:
        bigload.fetch("hf://org/tiny@main", tmp_path / "out")
    assert "--force" in caught.value.hint
    bigload.fetch("hf://org/tiny@main", tmp_path / "out", force=True)
    assert (tmp_path / "out" / "README.md").read_text() == "new"


@pytest.mark.parametrize("only", ["model.layers.1", "model.layers.1.*", ["model.layers.1.*.weight", "lm_head.weight"]])
def test_only_the_ranges_of_the_named_tensors_are_transferred(served, repository, model, tmp_path, only):
    source = open_checkpoint("org/tiny")
    served.requests.clear()
    report = bigload.fetch(source, tmp_path / "out", only=only)
    part = open_checkpoint(tmp_path / "out")
    whole = bigload.load(model)
    names = [name for name in whole if name.startswith("model.layers.1.")]
    names += ["lm_head.weight"] if isinstance(only, list) else []
    assert sorted(part.tensors) == sorted(names)
    for name, tensor in bigload.load(tmp_path / "out").items():
        assert torch.equal(tensor, whole[name])
    beside = sum((model / file).stat().st_size for file in ("README.md", "tokenizer.json", "modeling.py"))
    assert body_bytes(served) < sum(whole[name].nbytes for name in names) + beside + 1000
    assert report.part.num_tensors == len(names)
    assert bigload.verify(tmp_path / "out").ok


def test_a_file_of_which_nearly_all_is_needed_comes_whole(served, repository, model, tmp_path):
    source = open_checkpoint(model)
    shard = source.shards[1].file
    names = [name for name, tensor in source.tensors.items() if tensor.span.file == shard]
    small = min(names, key=lambda name: source.tensors[name].num_bytes)
    report = bigload.fetch("org/tiny", tmp_path / "out", only=[name for name in names if name != small])
    assert (tmp_path / "out" / shard).read_bytes() == (model / shard).read_bytes()
    assert (report.num_hashed, report.part.num_tensors) == (1, len(names))
    assert set(open_checkpoint(tmp_path / "out").tensors) == set(names)


def test_a_part_says_what_it_is_a_part_of(served, repository, tmp_path):
    bigload.fetch("org/tiny", tmp_path / "out", only="model.layers.1")
    (warning,) = (warning for warning in open_checkpoint(tmp_path / "out").warnings if warning.code == "part")
    assert f"a part of hf://org/tiny@{repository.commit}, 7 of 31 tensors " in warning.text
    assert "(only model.layers.1)" in warning.text
    assert bigload.plan(tmp_path / "out", {"cpu": "1GiB"}).total_bytes
    bigload.reshard(tmp_path / "out", tmp_path / "split", layout="shards")
    module = torch.nn.Linear(2, 2)
    with pytest.raises(StateDictMismatchError, match="2 missing") as caught:
        bigload.load(tmp_path / "out", into=module)
    assert f"a part of hf://org/tiny@{repository.commit}" in caught.value.hint
    (tmp_path / "out" / PART_FILE).write_text("[]")
    assert "does not say of which" in open_checkpoint(tmp_path / "out").warnings[-1].text


def test_a_part_of_torch_files_is_safetensors(served, model, tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    torch.save({"a": torch.arange(1000.0), "b": torch.ones(2)}, folder / "pytorch_model.bin")
    served.add("org/torch", folder)
    bigload.fetch("org/torch", tmp_path / "out", only="b")
    assert [*bigload.load(tmp_path / "out")] == ["b"]
    assert (tmp_path / "out" / "model.safetensors").exists()
    bigload.fetch("org/torch", tmp_path / "whole")
    assert fetched_files(tmp_path / "whole") == contents(folder)


@pytest.mark.parametrize("rank", [0, 3])
def test_the_slices_of_a_rank_are_those_of_a_reshard(served, repository, model, tmp_path, rank):
    bigload.reshard(model, tmp_path / "ranks", tp=4)
    report = bigload.fetch("org/tiny", tmp_path / "out", rank=rank, tp=4)
    expected, found = contents(tmp_path / "ranks"), contents(tmp_path / "out")
    assert found.keys() - {MANIFEST_FILE, PART_FILE, f"rank-{rank}/{PART_FILE}"} == {
        name for name in expected if not name.startswith("rank-") or name.startswith(f"rank-{rank}/")
    } - {MANIFEST_FILE}
    assert {name for name in found if name in expected and found[name] != expected[name]} == {MANIFEST_FILE}
    assert bigload.read_ranks(tmp_path / "out").checkpoint(rank).tensors
    assert report.part.selection == {"rank": rank, "tp": 4}
    assert bigload.verify(tmp_path / "out").ok


def test_the_weights_of_a_device_are_those_of_a_reshard(served, repository, model, tmp_path):
    plan = bigload.plan("org/tiny", {"cuda:0": "150KiB", "cuda:1": "150KiB", "cpu": "1GiB"}, overhead=0)
    bigload.reshard(plan, tmp_path / "split", checkpoint=model)
    bigload.fetch("org/tiny", tmp_path / "out", plan=plan, device="cuda:1")
    expected, found = contents(tmp_path / "split"), contents(tmp_path / "out")
    weights = {name for name in expected if name.startswith("cuda-1/")}
    assert weights <= found.keys()
    assert all(found[name] == expected[name] for name in weights)
    there = set(open_checkpoint(tmp_path / "split" / "cuda-1").tensors)
    for folder in (tmp_path / "out", tmp_path / "out" / "cuda-1"):
        part = open_checkpoint(folder)
        assert set(part.tensors) == there
        assert part.warnings[-1].code == "part"
    both = bigload.fetch("org/tiny", tmp_path / "both", plan=plan, device=["cuda:0", "cuda:1"])
    assert both.part.num_tensors > len(there)


def test_a_plan_of_another_version_of_the_model_is_refused(served, repository, model, tmp_path):
    plan = bigload.plan(model, {"cpu": "1GiB"})
    other = served.add("org/other", tmp_path / "ranks")
    bigload.reshard(model, tmp_path / "ranks", layout="shards", max_shard_bytes=60_000)
    assert other.folder
    with pytest.raises(StalePlanError):
        bigload.fetch("org/other", tmp_path / "out", plan=plan, device="cpu")


def test_a_body_that_is_not_what_the_hub_says_is_an_error_and_comes_again(served, repository, model, tmp_path):
    file = next(path for path in sorted(model.iterdir()) if path.suffix == ".safetensors")
    truth = file.read_bytes()
    bigload.open_checkpoint("org/tiny")  # its headers are right
    repository_etags = dict(repository.etags)
    status = file.stat()
    file.write_bytes(truth[:-1] + bytes([truth[-1] ^ 1]))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert repository_etags == repository.etags
    with pytest.raises(ReadError, match=rf"{file.name}.*SHA-256 is .*{hashlib.sha256(truth).hexdigest()}"):
        bigload.fetch("org/tiny", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    file.write_bytes(truth)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    bigload.fetch("org/tiny", tmp_path / "out")
    assert fetched_files(tmp_path / "out") == contents(model)


def test_parts_of_two_commits_are_never_mixed(served, repository, model, tmp_path):
    source = open_checkpoint("org/tiny")
    served.fault("cdn", file="model-00003-of-00003.safetensors", times=-1, status=403)
    with pytest.raises(AccessDeniedError, match="model-00003") as caught:
        bigload.fetch(source, tmp_path / "out", threads=1)
    assert caught.value.hint.startswith("fix the cause and rerun the command: ")
    served.faults.clear()
    repository.refs["main"] = repository.commit = "e" * 40
    begun = rf"the interrupted run there is of {source.path}, this one of hf://org/tiny@{'e' * 40}"
    with pytest.raises(OutputExistsError, match=begun) as caught:
        bigload.fetch(f"org/tiny@{'e' * 40}", tmp_path / "out")
    assert caught.value.hint == "rerun it with that source, or discard its work with --force"
    bigload.fetch(f"org/tiny@{'e' * 40}", tmp_path / "out", force=True)
    assert fetched_files(tmp_path / "out") == contents(model)


@pytest.mark.parametrize("name", ["fetch", "reshard"])
def test_a_branch_that_moved_since_the_interruption_begins_anew_only_if_asked(
    served, repository, model, tmp_path, name
):
    """The commands name the branch; a plan file names the commit that it was made of."""
    work = getattr(bigload, name)
    options = {"threads": 1} | ({"max_shard_bytes": 60_000, "resume": True} if name == "reshard" else {})
    plan = bigload.plan("org/tiny", {"cpu": "1GiB"})
    first = f"hf://org/tiny@{repository.commit}"
    served.fault("cdn", file="model-00003-of-00003.safetensors", times=-1, status=403)
    with pytest.raises(AccessDeniedError):
        work("org/tiny", tmp_path / "out", **options)
    served.faults.clear()
    repository.refs["main"] = repository.commit = "e" * 40
    shard = next(path for path in sorted(model.iterdir()) if path.suffix == ".safetensors")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    for ref in (cache_folder() / "revisions").iterdir():
        os.utime(ref, (1, 1))  # a branch is taken to be where it was for a while
    hub._listings.clear()
    before = contents(tmp_path / "out.partial")
    with pytest.raises(OutputExistsError, match=f"there is of {first}, this one of hf://org/tiny@eee"):
        work("org/tiny", tmp_path / "out", **options)
    assert contents(tmp_path / "out.partial") == before
    with pytest.raises(StalePlanError, match=shard.name):
        bigload.fetch("org/tiny", tmp_path / "cpu", plan=plan, device="cpu")
    with pytest.raises(StalePlanError, match=shard.name):
        bigload.reshard(plan, tmp_path / "cpu", checkpoint="org/tiny")
    assert not (tmp_path / "cpu.partial").exists()
    work("org/tiny", tmp_path / "out", force=True, **(options | ({"resume": False} if name == "reshard" else {})))
    found = bigload.load(tmp_path / "out")
    assert all(torch.equal(found[name], tensor) for name, tensor in bigload.load(model).items())


def test_offline_what_is_cached_is_fetched_and_the_rest_is_named_before_anything_is_made(
    served, repository, model, tmp_path, monkeypatch
):
    from huggingface_hub import constants, hf_hub_download

    open_checkpoint("org/tiny")
    hf_hub_download("org/tiny", "README.md", cache_dir=constants.HF_HUB_CACHE, endpoint=served.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for work in (prepare_fetch, bigload.fetch):
        with pytest.raises(ReadError, match=r"offline mode is on, and the caches lack 9 of 10 files") as caught:
            work("org/tiny", tmp_path / "out")
        absent, cached = caught.value.details
        assert re.fullmatch("not cached: (model-0000[123]-of-00003.safetensors, ){3}… and 6 more", absent)
        assert cached == "cached: README.md"
    with pytest.raises(ReadError, match=r"the caches lack 3 of 3 files"):
        bigload.reshard("org/tiny", tmp_path / "out", layout="shards")
    assert not (tmp_path / "out.partial").exists()
    bigload.fetch("org/tiny", tmp_path / "readme", include="README.md")
    assert fetched_files(tmp_path / "readme") == {"README.md": b"README.md", PART_FILE: mock.ANY}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in contents(model):
        hf_hub_download("org/tiny", name, cache_dir=constants.HF_HUB_CACHE, endpoint=served.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    served.requests.clear()
    bigload.fetch("org/tiny", tmp_path / "out")
    assert fetched_files(tmp_path / "out") == contents(model)
    assert not served.requests


def test_a_disk_that_is_too_small_is_known_before_a_byte_is_transferred(served, repository, tmp_path, monkeypatch):
    source = open_checkpoint("org/tiny")
    served.requests.clear()
    usage = output_place.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(output_place.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(NotEnoughSpaceError):
        bigload.fetch(source, tmp_path / "out")
    assert body_bytes(served) == 0


def test_a_disk_that_fills_up_leaves_what_can_be_resumed(served, repository, model, tmp_path, monkeypatch):
    calls, pwrite = [], os.pwrite

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(WriteError, match="No space left") as caught:
        bigload.fetch("org/tiny", tmp_path / "out", threads=1)
    assert caught.value.hint.startswith("make room there and rerun the command: ")
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert bigload.fetch("org/tiny", tmp_path / "out").kept_bytes
    assert fetched_files(tmp_path / "out") == contents(model)


def test_files_of_a_web_server_that_lists_nothing_come_by_their_names(served, model, tmp_path):
    bigload.fetch(served.serve("plain", model), tmp_path / "out")
    found = fetched_files(tmp_path / "out")
    assert found == {name: content for name, content in contents(model).items() if name in found}
    assert {"config.json", "README.md", "model.safetensors.index.json"} < found.keys()
    assert open_checkpoint(tmp_path / "out").tensors == open_checkpoint(model).tensors


def test_what_would_be_transferred_is_known_before(served, repository, model, tmp_path):
    source = open_checkpoint("org/tiny")
    served.requests.clear()
    prepared = prepare_fetch(source, tmp_path / "out", FetchOptions(only=("model.layers.2",)))
    assert body_bytes(served) == 0
    assert not (tmp_path / "out.partial").exists()
    assert prepared.num_ranges >= 5
    bigload.fetch(source, tmp_path / "out", only="model.layers.2")
    assert body_bytes(served) == prepared.transfer_bytes


WRONG = [
    ({"only": "model.layer.1"}, "close to|names or patterns of tensors"),
    ({"only": "lm_head", "rank": 0, "tp": 2}, "nothing beside only"),
    ({"rank": 1}, "tp is not given"),
    ({"tp": 2}, "rank is not given"),
    ({"rank": 2, "tp": 2}, "0 to 1, of 2 ranks"),
    ({"device": "cuda:0"}, "plan is not given"),
    ({"tp_rules": {}}, "tp is not given"),
    ({"include": "*.nothing"}, "patterns that leave files"),
    ({"max_inflight": 3}, "max_inflight"),
    ({"threads": 0}, "threads"),
]


@pytest.mark.parametrize(("options", "text"), WRONG)
def test_options_that_do_not_go_together_or_stand_for_nothing_are_refused(model, tmp_path, options, text):
    with pytest.raises(OptionError, match=text):
        bigload.fetch(model, tmp_path / "out", **options)
    assert not (tmp_path / "out.partial").exists()


def test_a_device_without_weights_is_refused(model, tmp_path):
    plan = bigload.plan(model, {"cuda:0": "1GiB", "cpu": "1GiB"})
    with pytest.raises(OptionError, match="devices with weights in the plan: cuda-0"):
        bigload.fetch(model, tmp_path / "out", plan=plan, device="cpu")
    with pytest.raises(OptionError, match="device"):
        bigload.fetch(model, tmp_path / "out", plan=plan, device="gpu")


def test_the_index_of_a_part_names_what_is_there(served, repository, tmp_path):
    bigload.fetch("org/tiny", tmp_path / "out", exclude="model-00002-*")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00003.safetensors" for n in (1, 3)}
    part = open_checkpoint(tmp_path / "out")
    assert part.warnings[-1].code == "part"
    bigload.fetch(tmp_path / "out", tmp_path / "copy")
    assert open_checkpoint(tmp_path / "copy").warnings == part.warnings
