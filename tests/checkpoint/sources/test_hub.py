"""Repositories of the Hub, served from the loopback with the real huggingface_hub in between."""

import os
import re
import threading

import pytest
import torch

import bigload
from bigload.checkpoint.byte_source import PositionalReader, scheme_of
from bigload.checkpoint.location import locate
from bigload.checkpoint.source import open_checkpoint
from bigload.checkpoint.sources import hub as hub_source
from bigload.checkpoint.sources.hub import HubAddress, parse_address
from bigload.checkpoint.sources.small_reads import cache_folder
from bigload.errors import AccessDeniedError, CheckpointError, CheckpointNotFoundError, ReadError, StalePlanError
from bigload.machine.threads.activities import NO_RECORDER
from bigload.planning.plan_file import open_planned, plan_from_json, plan_to_json
from builders import make_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def repository(served, tmp_path):
    return served.add("org/tiny", make_checkpoint(tmp_path / "source", shards=3))


def forget():
    """Have the process forget what it knows, as a new one would."""
    hub_source._listings.clear()


def read_plan_text(plan):
    return plan_from_json(plan_to_json(plan))


def without_agents(server):
    """The requests but for huggingface_hub's own question about agents, which it asks once a day."""
    return [request for request in server.requests if "agent-harnesses" not in request.path]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/model", ("org/model", "", "")),
        ("hf://org/model", ("org/model", "", "")),
        ("hf:/org/model/", ("org/model", "", "")),
        ("org/model@v1.0", ("org/model", "v1.0", "")),
        ("org/model@v1.0/sub/model.safetensors", ("org/model", "v1.0", "sub/model.safetensors")),
        ("org/model/sub", ("org/model", "", "sub")),
        ("org/model@refs/pr/3/sub", ("org/model", "refs/pr/3", "sub")),
        ("org/model@refs%2Fpr%2F3/sub", ("org/model", "refs/pr/3", "sub")),
    ],
)
def test_what_a_user_writes_is_a_repository_a_revision_and_a_path(text, expected):
    address = parse_address(text)
    assert (address.repo, address.revision, address.path) == expected
    assert parse_address(str(address.location)) == address


@pytest.mark.parametrize("text", ["model", "/org/model", "./org", "org/--x", "a..b/c", "x/y.git", "org/m/../x", "a/b@"])
def test_other_texts_are_no_repository(text):
    assert parse_address(text) is None


def test_a_repository_opens_as_its_folder_does_and_its_path_names_the_commit(served, repository, tmp_path):
    remote, local = open_checkpoint("org/tiny"), open_checkpoint(tmp_path / "source")
    assert remote.path == f"hf://org/tiny@{repository.commit}"
    assert (remote.name, remote.tensors, remote.config) == ("tiny", local.tensors, local.config)
    assert all(name in ("org", "tiny") or "/" not in name for name in remote.tensors)
    # One for the list, the index, the config and each of three shards, which lead to the content network.
    assert len(without_agents(served)) == 1 + 1 + 1 + 3 + 3


def test_a_second_call_makes_no_request(served, repository):
    first = open_checkpoint("org/tiny")
    served.requests.clear()
    forget()
    assert open_checkpoint("org/tiny") == first
    assert open_checkpoint(f"org/tiny@{repository.commit}").shards == first.shards
    assert not without_agents(served)


def test_a_branch_is_asked_for_again_when_its_commit_was_resolved_long_ago(served, repository, monkeypatch):
    open_checkpoint("org/tiny")
    (ref,) = (cache_folder() / "revisions").iterdir()
    os.utime(ref, (1, 1))
    repository.refs["main"] = repository.commit = COMMIT
    forget()
    assert open_checkpoint("org/tiny").path.endswith(COMMIT)


def test_a_damaged_cache_is_read_again(served, repository):
    first = open_checkpoint("org/tiny")
    for file in cache_folder().rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-3])
    forget()
    assert open_checkpoint("org/tiny") == first


def test_a_cache_that_cannot_be_written_is_no_error(served, repository, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(open_checkpoint("org/tiny").shards) == 3


def test_tensors_are_loaded_from_the_hub(served, repository, tmp_path):
    expected, found = bigload.load(tmp_path / "source"), bigload.load("org/tiny")
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_subfolders_files_and_indexes_open(served, tmp_path):
    make_checkpoint(tmp_path / "repo/sub", shards=2)
    make_checkpoint(tmp_path / "repo/one", shards=1)
    served.add("org/many", tmp_path / "repo")
    whole = open_checkpoint("org/many/sub")
    assert len(whole.shards) == 2
    assert open_checkpoint("hf://org/many/sub/model.safetensors.index.json").tensors == whole.tensors
    assert open_checkpoint("org/many@main/one/model.safetensors").shards == open_checkpoint("org/many/one").shards


def test_a_local_path_that_exists_comes_first(served, repository, tmp_path):
    make_checkpoint(tmp_path / "org/tiny", shards=1)
    assert open_checkpoint("org/tiny").root == tmp_path / "org/tiny" or open_checkpoint("org/tiny").path == "org/tiny"
    assert not served.requests


def test_a_mistyped_path_below_a_local_folder_is_no_repository(served, tmp_path):
    (tmp_path / "models").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"no such file or folder$"):
        open_checkpoint("models/llama/model.safetensors")
    assert not served.requests


def cached_from(served, tmp_path, *files):
    """Have the Hugging Face cache hold some files, by the real client."""
    from huggingface_hub import constants, hf_hub_download

    for file in files:
        hf_hub_download("org/tiny", file, cache_dir=constants.HF_HUB_CACHE, endpoint=served.url)
    served.requests.clear()


def test_what_the_hugging_face_cache_has_whole_is_opened_there_without_a_request(served, repository, tmp_path):
    cached_from(served, tmp_path, *(file.name for file in (tmp_path / "source").iterdir()))
    opened = open_checkpoint("org/tiny")
    assert opened.root == tmp_path / f"cache/hub/models--org--tiny/snapshots/{repository.commit}"
    assert not served.requests


def test_single_files_of_the_hugging_face_cache_are_read_there(served, repository, tmp_path):
    shards = sorted(file.name for file in (tmp_path / "source").glob("*.safetensors"))
    cached_from(served, tmp_path, shards[0])
    opened = open_checkpoint("org/tiny")
    assert not [request for request in served.requests if shards[0] in request.path]
    source = scheme_of(opened.root).open(opened.root / shards[0], NO_RECORDER)
    assert isinstance(source, PositionalReader)
    source.close()


def test_offline_what_was_read_before_opens_and_the_rest_says_what_is_cached(served, repository, monkeypatch):
    from huggingface_hub import constants

    first = open_checkpoint("org/tiny")
    forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint("org/tiny") == first
    with pytest.raises(CheckpointError, match="offline mode is on"):
        open_checkpoint("org/other")
    with pytest.raises(ReadError, match=r"offline mode is on, and the caches lack 3 of 3 files"):
        bigload.load("org/tiny")


def test_a_repository_that_does_not_exist_names_the_nearest(served, repository):
    with pytest.raises(CheckpointNotFoundError, match="no such repository, or it is private") as caught:
        open_checkpoint("hf://org/tyni")
    assert "did you mean org/tiny?" in caught.value.hint
    assert "hf auth login" in caught.value.hint


def test_a_revision_or_a_file_that_does_not_exist_names_the_nearest(served, repository):
    with pytest.raises(CheckpointNotFoundError, match='no revision "mian"') as caught:
        open_checkpoint("org/tiny@mian")
    assert caught.value.hint == "did you mean main?"
    with pytest.raises(CheckpointNotFoundError, match=r'has no "config\.jsno"') as caught:
        open_checkpoint("org/tiny/config.jsno")
    assert "config.json" in caught.value.hint


def test_a_gated_repository_says_where_to_ask_and_opens_with_the_token(served, tmp_path, monkeypatch):
    served.add("org/tiny", make_checkpoint(tmp_path / "source", shards=3), gated=True)
    with pytest.raises(AccessDeniedError, match="gated") as caught:
        open_checkpoint("org/tiny")
    assert "https://huggingface.co/org/tiny" in caught.value.hint
    monkeypatch.setenv("HF_TOKEN", served.token)
    assert len(open_checkpoint("org/tiny").shards) == 3
    assert {request.headers.get("authorization") for request in served.requests if request.route == "cdn"} == {None}


def test_no_error_holds_the_token_or_a_signed_address(served, repository, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", served.token)
    served.fault("cdn", times=-1, status=403)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("org/tiny")
    for secret in (served.token, "Signature", "secret"):
        assert secret not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"


def test_a_missing_shard_is_a_problem_of_the_checkpoint(served, repository, tmp_path):
    next((tmp_path / "source").glob("*-00002-*")).unlink()
    with pytest.raises(bigload.InvalidCheckpointError, match=r"00002.*missing, but named in model.safetensors.index"):
        open_checkpoint("org/tiny")


def test_an_index_with_an_address_is_refused(served, repository, tmp_path):
    index = tmp_path / "source/model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001", "https://evil.example/model-00001"))
    with pytest.raises(bigload.InvalidCheckpointError):
        open_checkpoint("org/tiny")
    assert not [request for request in served.requests if "evil" in request.path]


def test_a_file_whose_etag_is_not_that_of_the_commit_is_an_error(served, repository):
    served.fault("resolve", file="-00001-of-00003.safetensors", headers={"X-Linked-Etag": '"another"'})
    with pytest.raises(CheckpointError, match="it changed since the checkpoint was opened: ETag"):
        open_checkpoint("org/tiny")


def test_a_plan_names_the_commit_and_is_checked_without_a_request(served, repository, tmp_path):
    plan = bigload.plan("org/tiny", {"cpu": "1GiB"})
    assert plan.checkpoint_path == f"hf://org/tiny@{repository.commit}"
    served.requests.clear()
    forget()
    assert bigload.plan(plan.checkpoint_path, {"cpu": "1GiB"}) == plan
    assert not served.requests


def test_a_plan_is_stale_when_files_of_the_same_form_have_other_weights(served, repository, tmp_path):
    plan = bigload.plan("org/tiny", {"cpu": "1GiB"})
    assert read_plan_text(plan) == plan
    shard = tmp_path / "source/model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    repository.refs["main"] = COMMIT
    with pytest.raises(StalePlanError) as caught:
        open_planned(plan, f"org/tiny@{COMMIT}")
    (line,) = caught.value.changes
    assert re.fullmatch(r"model-00002-of-00003.safetensors   ETag [0-9a-f]{16} then, [0-9a-f]{16} now", line)


def test_a_location_in_a_folder_of_the_commit_has_identity_and_digest(served, repository, tmp_path):
    location = locate("org/tiny")
    files = scheme_of(location).list_folder(location)
    name = "model-00001-of-00003.safetensors"
    assert files[name] == scheme_of(location).identity(location / name)
    assert files[name].version == (repository.commit, files[name].sha256)
    assert files[name].num_bytes == (tmp_path / "source" / name).stat().st_size
    assert HubAddress(repo="org/tiny", revision=repository.commit, path="").location == location


def test_another_commit_is_another_identity(served, repository, tmp_path):
    first = locate("org/tiny")
    repository.refs["other"] = COMMIT
    assert locate("org/tiny@other") != first


def test_headers_of_requests_are_made_once_for_all_threads(served, monkeypatch):
    made, begin = [], threading.Barrier(8)
    hub_source._headers_with.cache_clear()
    monkeypatch.setattr("huggingface_hub.utils.build_hf_headers", lambda **_: made.append(1) or {})
    threads = [threading.Thread(target=lambda: (begin.wait(), hub_source._headers())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hub_source._headers_with.cache_clear()
    assert len(made) == 1
