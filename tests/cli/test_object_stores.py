"""Commands on a bucket of a loopback S3, by each client."""

import json
import shutil

import pytest

from builders import make_checkpoint
from hub_server import HubServer
from object_store_clients import CLIENTS, use_client

LOCATION = "s3://bucket/tiny"


@pytest.fixture
def server():
    with HubServer() as server:
        yield server


@pytest.fixture(params=CLIENTS)
def bucket(request, server, tmp_path, monkeypatch):
    """A folder that is served as a bucket, with a checkpoint of three shards."""
    use_client(request.param, monkeypatch)
    folder = make_checkpoint(tmp_path / "bucket/tiny", shards=3)
    config = json.loads((folder / "config.json").read_text())
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
    (folder / "config.json").write_text(json.dumps(config | heads))
    return folder.parent


@pytest.fixture
def answer(run, server, bucket, tmp_path):
    """Return a function that runs a command, and gives its JSON; with `code`, that it ends with and its errors."""
    others = {
        **{"GOOGLE_BASE_URL": f"{server.url}/s3", "GOOGLE_SKIP_SIGNATURE": "true"},
        **{"AZURE_STORAGE_ENDPOINT": f"{server.url}/s3", "AZURE_SKIP_SIGNATURE": "true"},
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
    }
    variables = {**server.environment(tmp_path / "cache"), **server.serve_bucket("bucket", bucket), **others}

    def answer(command, *, code=0):
        done = run(f"bigload {command}", variables)
        assert done.code == code, done.stderr
        return json.loads(done.stdout) if code == 0 else done.stderr

    return answer


def test_every_command_takes_a_bucket(answer, bucket, here):
    assert answer(f"inspect {LOCATION} --json")["path"] == LOCATION
    assert answer(f"plan {LOCATION} -m cpu=1GiB -o plan.json --json")["checkpoint"]["path"] == LOCATION
    answer(f"fetch {LOCATION} copy --json")
    answer("reshard plan.json out --json")
    answer(f"reshard {LOCATION} ranks --tp 2 --json")
    for name in ("copy", "out", "ranks"):
        shutil.copytree(here / name, bucket / name)
        assert answer(f"verify s3://bucket/{name} --json")["problems"] == []
    assert answer(f"bench-load {LOCATION} --runs 1 --threads 1 --json")


@pytest.mark.parametrize("bucket", CLIENTS[:1], indirect=True)
def test_plan_after_inspect_sends_no_request(answer, server):
    answer(f"inspect {LOCATION} --json")
    server.requests.clear()
    answer(f"plan {LOCATION} -m cpu=1GiB --json")
    assert not server.requests


def test_verify_finds_what_is_damaged_or_gone_in_a_bucket(answer, bucket, here):
    answer(f"reshard {LOCATION} ranks --tp 2 --json")
    shutil.copytree(here / "ranks", bucket / "ranks")
    shard = next((bucket / "ranks/rank-1").glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    errors = answer("verify s3://bucket/ranks", code=1)
    assert f"error: s3://bucket/ranks is not what was written: 1 problem in 1 file\n  rank-1/{shard.name}: " in errors
    shard.unlink()
    assert f"rank-1/{shard.name}: missing" in answer("verify s3://bucket/ranks", code=1)
    assert "error: no manifest of s3://bucket/tiny: " in answer("verify s3://bucket/tiny", code=2)


@pytest.mark.parametrize("scheme", ["gs", "az"])
@pytest.mark.parametrize("bucket", CLIENTS[:1], indirect=True)
def test_a_folder_in_another_store_is_verified(answer, server, bucket, here, scheme):
    answer(f"reshard {LOCATION} ranks --tp 2 --json")
    shutil.copytree(here / "ranks", bucket / "ranks")
    server.key = ""  # nothing is signed
    assert answer(f"verify {scheme}://bucket/ranks --json")["problems"] == []
    shard = next((bucket / "ranks/rank-1").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert f"rank-1/{shard.name}: tensor " in answer(f"verify {scheme}://bucket/ranks", code=1)


@pytest.mark.parametrize("command", [f"reshard {LOCATION} s3://bucket/out --tp 2", f"fetch {LOCATION} s3://bucket/out"])
def test_nothing_is_written_to_a_bucket_nor_to_a_folder_of_its_name(answer, here, command):
    errors = answer(command, code=2)
    assert errors.startswith("error: will not write to s3://bucket/out: files are written to this machine only\nhint: ")
    assert not (here / "s3:").exists()
