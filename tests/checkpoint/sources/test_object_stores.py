"""Checkpoints in S3, on a loopback server: by obstore, and by s3fs where obstore is not installed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import bigload
from bigload.checkpoint import byte_source
from bigload.checkpoint.sources import fsspec_files, object_stores, small_reads
from bigload.errors import (
    AccessDeniedError,
    CheckpointError,
    CheckpointNotFoundError,
    MissingPackageError,
    ReadError,
    StalePlanError,
)
from builders import make_checkpoint
from object_store_clients import CLIENTS, use_client

LOCATION = "s3://bucket/models/tiny"


@pytest.fixture(params=CLIENTS)
def client(request, monkeypatch):
    """The client by which `s3` is read."""
    use_client(request.param, monkeypatch)
    return request.param


@pytest.fixture
def bucket(served, tmp_path, client, monkeypatch):
    """A folder that is served as a bucket, with a checkpoint of three shards."""
    make_checkpoint(tmp_path / "bucket/models/tiny", shards=3)
    for name, value in served.serve_bucket("bucket", tmp_path / "bucket").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "bucket"


def shard(bucket):
    return sorted(bucket.glob("models/tiny/*.safetensors"))[1]


def test_inspect_plan_load_and_reshard_give_what_the_folder_gives(bucket, tmp_path):
    local = bigload.open_checkpoint(bucket / "models/tiny")
    remote = bigload.open_checkpoint(LOCATION)
    assert (remote.tensors, remote.config, remote.path) == (local.tensors, local.config, LOCATION)
    plan = bigload.plan(remote, {"cpu": "1GiB"})
    assert plan.device_map == bigload.plan(local, {"cpu": "1GiB"}).device_map
    expected, found = bigload.load(local), bigload.load(remote)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert found.keys() == expected.keys()
    report = bigload.reshard(plan, tmp_path / "out")
    assert bigload.verify(report.out).ok
    written = bigload.load(tmp_path / "out/cpu")
    assert written.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in written.items())


def test_one_file_and_an_index_are_opened_by_their_names(bucket):
    whole = bigload.open_checkpoint(LOCATION)
    assert bigload.open_checkpoint(f"{LOCATION}/model.safetensors.index.json").tensors == whole.tensors
    part = bigload.open_checkpoint(f"{LOCATION}/{shard(bucket).name}")
    assert part.tensors.items() < whole.tensors.items()


def test_a_folder_is_listed_with_the_folders_in_it_and_not_its_namesakes(bucket, tmp_path):
    (bucket / "models/tiny/sub").mkdir()
    (bucket / "models/tiny/sub/a b+c.json").write_text("{}")
    (bucket / "models/tiny-2").mkdir()
    (bucket / "models/tiny-2/x.json").write_text("{}")
    location = Path(LOCATION)
    scheme = byte_source.scheme_of(location)
    listed = scheme.list_folder(location)
    files = [path for path in (bucket / "models/tiny").rglob("*") if path.is_file()]
    assert set(listed) == {path.relative_to(bucket / "models/tiny").as_posix() for path in files}
    assert listed["sub/a b+c.json"] == scheme.identity(location / "sub/a b+c.json")
    assert scheme.list_folder(Path("s3://bucket/none")) == {}


def test_headers_are_read_again_only_from_the_disk(bucket, served, client):
    bigload.open_checkpoint(LOCATION)
    served.requests.clear()
    bigload.open_checkpoint(LOCATION)
    gets = [request for request in served.requests if request.method == "GET" and "list-type" not in request.path]
    assert bool(gets) == (client == "s3fs")


def recent(**options):
    return bigload.open_checkpoint(LOCATION, trusts_recent=True, **options)


@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
def test_one_listing_replaces_a_request_for_each_file(bucket, served):
    checkpoint = recent()
    assert [request.method for request in served.requests] == ["GET"] * 6  # listing, index, config, three headers
    served.requests.clear()
    bigload.load(checkpoint)
    listings = [request for request in served.requests if "list-type" in request.path]
    assert (len(listings), len(served.requests)) == (2, 5)  # before and after the data of three shards


@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
def test_a_recent_listing_is_used_without_a_request_where_that_is_asked_for(bucket, served, monkeypatch, tmp_path):
    opened = recent()
    served.requests.clear()
    assert recent() == opened
    assert not served.requests

    def is_asked():
        served.requests.clear()
        assert recent() == opened
        return bool(served.requests)

    (listing,) = (tmp_path / "cache/bigload/folders").iterdir()
    os.utime(listing, (0, time.time() - small_reads.TRUSTED_SECONDS - 1))
    assert [is_asked(), is_asked()] == [True, False]
    monkeypatch.setenv("BIGLOAD_REFRESH", "1")
    assert [is_asked(), is_asked()] == [True, True]
    monkeypatch.delenv("BIGLOAD_REFRESH")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another user")
    assert [is_asked(), is_asked()] == [True, False]


@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
def test_a_recent_listing_never_gives_the_data_of_an_object_that_changed(bucket, served):
    before = recent()
    content = bytearray(shard(bucket).read_bytes())
    content[-1] ^= 1
    shard(bucket).write_bytes(content)
    assert recent() == before
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened"):
        bigload.load(before)
    expected, found = bigload.load(bucket / "models/tiny"), bigload.load(recent())  # the load has listed the folder
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
@pytest.mark.parametrize("change", ["no shard", "other header"])
def test_a_recent_listing_that_does_not_make_a_checkpoint_is_made_again(bucket, tmp_path, change):
    whole, path = recent(), shard(bucket)
    content = path.read_bytes()
    if change == "no shard":
        path.unlink()
        with pytest.raises(CheckpointError, match="missing, but named in"):
            bigload.open_checkpoint(LOCATION)
    shutil.rmtree(tmp_path / "cache/bigload/headers")
    path.write_bytes(content + b"\0")
    with pytest.raises(CheckpointError, match="after the last tensor"):
        recent()
    path.write_bytes(content)
    assert recent().tensors == whole.tensors


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://bucket/none", "no such folder, or it is empty"),
        (f"{LOCATION}/none.safetensors", "no such file"),
        ("s3://", "the address names no folder"),
    ],
)
def test_what_is_not_there_is_said_with_its_location(bucket, path, message):
    with pytest.raises(CheckpointNotFoundError, match=f"{path}.*{message}"):
        bigload.open_checkpoint(path)


def test_a_bucket_that_does_not_exist_is_an_error(bucket):
    with pytest.raises(CheckpointNotFoundError, match="s3://other/x"):
        bigload.open_checkpoint("s3://other/x")


def test_a_key_that_is_refused_never_appears_in_the_error(bucket, served):
    served.key = "another"
    with pytest.raises(AccessDeniedError, match=LOCATION) as caught:
        bigload.open_checkpoint(LOCATION)
    assert caught.value.hint
    assert os.environ["AWS_ACCESS_KEY_ID"] not in str(caught.value)
    assert os.environ["AWS_SECRET_ACCESS_KEY"] not in str(caught.value)


def test_what_to_check_depends_on_which_credentials_are_set(bucket, served, client, monkeypatch):
    served.key = "another"
    with pytest.raises(AccessDeniedError) as caught:
        bigload.open_checkpoint(LOCATION)
    assert caught.value.hint.startswith("check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY; the user needs the rights")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    use_client(client, monkeypatch)
    with pytest.raises(CheckpointError, match=r"(?i)secret.?access.?key") as caught:
        bigload.open_checkpoint(LOCATION)
    assert caught.value.hint.startswith("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")


@pytest.mark.parametrize(
    ("answer", "message", "hint"),
    [
        ("400 <Code>AuthorizationHeaderMalformed</Code><Region>xx-9</Region>", "is in another region", "to xx-9"),
        ("301 <Code>PermanentRedirect</Code>", "is in another region", "to the region of the bucket"),
        ("400 <Code>ExpiredToken</Code>", "the service answers 400 ExpiredToken", "check AWS_ACCESS_KEY_ID"),
    ],
)
@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
def test_a_wrong_region_and_an_old_token_are_told_apart(bucket, served, answer, message, hint):
    served.fault("s3", status=int(answer[:3]), body=f"<Error>{answer[4:]}</Error>".encode(), times=-1)
    with pytest.raises(CheckpointError, match=f"{LOCATION}: .*{message}") as caught:
        bigload.open_checkpoint(LOCATION)
    assert hint in caught.value.hint


@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
def test_a_connection_that_fails_is_an_error_with_its_cause_and_the_variable_of_the_address(bucket, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{closed.getsockname()[1]}")
    with pytest.raises(CheckpointError, match=f"{LOCATION}: the connection failed: Connection refused") as caught:
        bigload.open_checkpoint(LOCATION)
    assert caught.value.hint == "check the address in AWS_ENDPOINT_URL"


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_for_now_are_tried_again(bucket, served, client, status):
    if client == "s3fs" and status == 429:
        pytest.skip("botocore does not try again after 429")
    served.fault("s3", status=status, times=2)
    assert bigload.open_checkpoint(LOCATION).tensors


def test_a_service_that_keeps_failing_is_an_error_with_its_status(bucket, served, client):
    if client == "s3fs":
        pytest.skip("s3fs waits for a minute")
    served.fault("s3", status=503, times=-1)
    with pytest.raises(CheckpointError, match=f"{LOCATION}: the service answers 503"):
        bigload.open_checkpoint(LOCATION)


def test_reads_of_data_are_tried_longer_than_the_client_does(bucket, served, client, clock):
    if client == "s3fs":
        pytest.skip("s3fs waits for a minute")
    checkpoint = bigload.open_checkpoint(LOCATION)
    fault_of = served.fault_of
    served.fault_of = lambda route, path: None if served.requests[-1].method == "HEAD" else fault_of(route, path)
    served.fault("s3", file=shard(bucket).name, status=503, times=3 * (object_stores.RETRY["max_retries"] + 1))
    assert len(bigload.load(checkpoint, threads=1)) == len(checkpoint.tensors)
    assert clock.slept == [0.5, 1, 2]


def test_ctrl_c_does_not_wait_for_an_answer(tmp_path, bucket, client):
    if client == "s3fs":
        pytest.skip("the command line takes obstore")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        environment = {**os.environ, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        command = [sys.executable, "-m", "bigload_cli", "inspect", LOCATION]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
            connection, _ = silent.accept()
            connection.recv(1)
            process.send_signal(signal.SIGINT)
            assert process.wait() == 130
        connection.close()
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # no request was sent again: it ended before that
            silent.accept()


def test_an_answer_that_is_cut_off_is_continued(bucket, served, client):
    checkpoint = bigload.open_checkpoint(LOCATION)
    expected = bigload.load(bucket / "models/tiny")
    served.fault("s3", file=shard(bucket).name, cut_after=100, times=2)
    found = bigload.load(checkpoint)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_an_object_that_changed_after_its_header_was_read_is_an_error(bucket, tmp_path):
    checkpoint = bigload.open_checkpoint(LOCATION)
    plan = bigload.plan(checkpoint, {"cpu": "1GiB"})
    content = bytearray(shard(bucket).read_bytes())
    content[-1] ^= 1  # the header and the size stay
    shard(bucket).write_bytes(content)
    with pytest.raises(ReadError, match=r"it changed since the checkpoint was opened: .*ETag"):
        bigload.load(checkpoint)
    with pytest.raises(StalePlanError, match="ETag"):
        bigload.reshard(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_object_that_changes_between_two_ranges_is_an_error(bucket, client):
    if client == "s3fs":
        pytest.skip("fsspec has no conditional reads; loads compare identities at their end")
    location = Path(LOCATION) / shard(bucket).name
    source = byte_source.scheme_of(location).open(location, byte_source.NO_RECORDER)
    byte_source.read_range(source, 0, 8)
    shard(bucket).write_bytes(shard(bucket).read_bytes()[::-1])
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened"):
        byte_source.read_range(source, 8, 16)


@pytest.mark.parametrize("start", [-4, 4])
def test_a_range_that_passes_the_end_is_an_error(bucket, start):
    location, size = Path(LOCATION) / shard(bucket).name, shard(bucket).stat().st_size
    source = byte_source.scheme_of(location).open(location, byte_source.NO_RECORDER)
    with pytest.raises(ReadError, match=r"ended|Range Not Satisfiable"):
        byte_source.read_range(source, size + start, size + 8)


def test_a_service_without_ranges_is_an_error(bucket, served, client):
    checkpoint = bigload.open_checkpoint(LOCATION)
    served.fault("s3", file=".safetensors", no_ranges=True, times=-1)
    with pytest.raises(ReadError, match=r"byte ranges|bytes came"):
        bigload.load(checkpoint)


def test_a_copy_is_fetched(bucket, tmp_path):
    report = bigload.fetch(LOCATION, tmp_path / "copy")
    names = {path.name for path in (bucket / "models/tiny").iterdir()}
    assert report.num_files == len(names)
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (bucket / "models/tiny" / name).read_bytes()


@pytest.mark.parametrize(
    ("location", "variables"),
    [
        ("gs://bucket/models/tiny", {"GOOGLE_BASE_URL": "", "GOOGLE_SKIP_SIGNATURE": "true"}),
        ("az://bucket/models/tiny", {"AZURE_STORAGE_ENDPOINT": "", "AZURE_SKIP_SIGNATURE": "true"}),
    ],
)
@pytest.mark.parametrize("client", CLIENTS[:1], indirect=True)
def test_other_stores_are_read_by_the_same_calls(bucket, served, monkeypatch, location, variables):
    served.key = ""  # nothing is signed
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    for name, value in variables.items():
        monkeypatch.setenv(name, value or f"{served.url}/s3")
    expected, found = bigload.load(bucket / "models/tiny"), bigload.load(location)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    with pytest.raises(CheckpointNotFoundError, match='there is no bucket "other"'):
        bigload.open_checkpoint(location.replace("bucket", "other"))


def test_plans_and_the_command_line_hold_no_key(bucket, tmp_path, client):
    if client == "s3fs":
        pytest.skip("the command line takes obstore")
    command = [sys.executable, "-m", "bigload_cli", "plan", LOCATION, "-m", "cpu=1GiB", "-o", "plan.json", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    text = done.stdout + done.stderr + (tmp_path / "plan.json").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["checkpoint"]["path"] == LOCATION
    assert os.environ["AWS_ACCESS_KEY_ID"] not in text


@pytest.mark.parametrize("path", ["s3://user:s3cr3t@bucket/model", "s3://bucket/model?X-Amz-Signature=s3cr3t"])
def test_secrets_in_addresses_are_refused_and_not_repeated(client, path):
    with pytest.raises(CheckpointNotFoundError, match="s3://bucket/model: an address with") as caught:
        bigload.open_checkpoint(path)
    assert "s3cr3t" not in str(caught.value)


def test_without_any_client_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(byte_source, "_SCHEMES", {"s3": fsspec_files.scheme_named("s3")})
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(MissingPackageError, match="s3:// needs obstore") as caught:
        bigload.open_checkpoint("s3://bucket/model")
    assert caught.value.hint == "pip install 'bigload[remote]'"


@pytest.mark.parametrize("client", CLIENTS, indirect=True)
def test_a_checkpoint_is_loaded_from_motos_server(client, tmp_path, monkeypatch):
    reason = "moto's server is not installed: pip install 'moto[server]'"
    server_class = pytest.importorskip("moto.server", reason=reason).ThreadedMotoServer
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = server_class(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_DEFAULT_REGION")
        for name, value in zip(names, (endpoint, "key", "secret", "us-east-1", "us-east-1"), strict=True):
            monkeypatch.setenv(name, value)
        import boto3

        store = boto3.client("s3")
        store.create_bucket(Bucket="bucket")
        folder = make_checkpoint(tmp_path / "tiny", shards=3)
        for path in folder.iterdir():
            store.upload_file(str(path), "bucket", f"models/tiny/{path.name}")
        expected, found = bigload.load(folder), bigload.load(LOCATION)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
        with pytest.raises(CheckpointNotFoundError):
            bigload.open_checkpoint("s3://other-bucket/model")
    finally:
        server.stop()
