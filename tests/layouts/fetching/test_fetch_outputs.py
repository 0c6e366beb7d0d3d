"""Outputs that cannot be written: full disks, folders that refuse, places that belong to others."""

import errno
import json
import os
import shutil
import socket
import subprocess

import pytest

import bigload
from bigload.errors import NotEnoughSpaceError, OutputExistsError, WriteError
from bigload.machine.files.cache_folder import cache_folder
from bigload.units import KIB, MIB
from builders import contents, make_checkpoint
from hub_server import CHUNK_BYTES

WINDOW_BYTES = 256 * KIB
OPTIONS = {"threads": 1, "max_inflight": 3 * WINDOW_BYTES}

WORK = {
    "fetch": lambda out, **options: bigload.fetch("org/tiny", out, **options),
    "fetch a rank": lambda out, **options: bigload.fetch("org/tiny", out, rank=1, tp=2, **options),
    "reshard": lambda out, **options: bigload.reshard("org/tiny", out, max_shard_bytes=MIB, resume=True, **options),
}


@pytest.fixture
def model(tmp_path):
    """A model of 9 MB."""
    folder = make_checkpoint(tmp_path / "model", shards=3, blocks=2, hidden=256, vocab=2048)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 4}))
    return folder


@pytest.fixture
def repository(served, model):
    for server in served._servers:  # what waits in buffers of the system counts as sent
        server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHUNK_BYTES)
    return served.add("org/tiny", model)


@pytest.fixture
def disk(tmp_path):
    """A file system of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder]
    if shutil.which("mount") is None or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill_up(folder):
    (folder / "of-others").write_bytes(bytes(shutil.disk_usage(folder).free))


def body_bytes(server):
    return sum(request.num_bytes for request in server.requests if request.route != "api")


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_disk_that_others_fill_up_meanwhile_says_what_is_missing_and_loses_nothing(
    served, repository, disk, tmp_path, work
):
    bigload.open_checkpoint("org/tiny")
    served.requests.clear()
    work(tmp_path / "truth", **OPTIONS)
    whole = body_bytes(served)
    served.requests.clear()
    pieces = iter(range(3))

    def fill_at_the_third_piece():
        if next(pieces, None) == 2:
            fill_up(disk)  # space of begun files is reserved

    served.fault("cdn", times=-1, pause=fill_at_the_third_piece)
    with pytest.raises(WriteError, match="No space left on device") as caught:
        work(disk / "out", **OPTIONS)
    assert caught.value.errno == errno.ENOSPC
    amounts, short = caught.value.details
    assert ("still to write" in amounts, "free there" in amounts, short.startswith("short by ")) == (True,) * 3
    assert caught.value.hint.startswith("make room there and rerun the command")
    assert not (disk / "out").exists()
    with pytest.raises(NotEnoughSpaceError, match="not enough space"):  # before a byte is transferred
        work(disk / "out", **OPTIONS)
    (disk / "of-others").unlink()
    work(disk / "out", **OPTIONS)
    assert contents(disk / "out") == contents(tmp_path / "truth")
    assert body_bytes(served) <= whole + 5 * WINDOW_BYTES


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_a_folder_that_cannot_be_written_is_known_before_anything_is_made(served, repository, tmp_path, disk, work):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    with pytest.raises(WriteError, match=rf"cannot write {disk}: Read-only file system") as caught:
        work(disk / "new" / "out")
    assert caught.value.hint == "choose an output folder elsewhere"


def test_a_folder_without_permission_is_known_before_anything_is_made(served, repository, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # tests of root may write anywhere
    with pytest.raises(WriteError, match=rf"cannot write {tmp_path}: Permission denied"):
        bigload.fetch("org/tiny", tmp_path / "out")


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_an_output_that_is_a_file_or_below_one_is_refused(served, repository, tmp_path, work):
    (tmp_path / "file").touch()
    with pytest.raises(OutputExistsError, match="it exists"):
        work(tmp_path / "file")
    with pytest.raises(WriteError, match=rf"cannot write {tmp_path}/file: Not a directory"):
        work(tmp_path / "file" / "out")


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_an_output_inside_of_a_cache_is_refused(served, repository, tmp_path, work):
    hub_cache = tmp_path / "cache/hub/models--org--other"
    (hub_cache / "snapshots").mkdir(parents=True)
    for place in (hub_cache / "snapshots/out", cache_folder() / "out"):
        with pytest.raises(OutputExistsError, match="is a cache, whose program may delete it"):
            work(place)
        assert not place.exists()


def test_parents_that_are_missing_are_made(served, repository, model, tmp_path):
    bigload.fetch("org/tiny", tmp_path / "a" / "b" / "out")
    assert contents(model).items() <= contents(tmp_path / "a" / "b" / "out").items()
