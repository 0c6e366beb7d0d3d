"""Locations of fsspec: `memory://` from end to end, and file systems that fail in their own ways."""

import threading

import fsspec
import pytest
import torch
from fsspec.registry import known_implementations

import bigload
from bigload.checkpoint import byte_source
from bigload.checkpoint.sources import fsspec_files
from bigload.errors import AccessDeniedError, CheckpointError, CheckpointNotFoundError, ReadError
from builders import make_checkpoint


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A checkpoint in `memory://models/tiny`, and fsspec's file system."""
    monkeypatch.setattr(byte_source, "_SCHEMES", {"file": byte_source._FILE})
    system = fsspec.filesystem("memory")
    system.store.clear()
    for path in make_checkpoint(tmp_path / "tiny", shards=3).iterdir():
        system.pipe_file(f"/models/tiny/{path.name}", path.read_bytes())
    yield system
    system.store.clear()


def test_inspect_plan_load_and_reshard_give_what_the_folder_gives(memory, tmp_path):
    local, remote = bigload.open_checkpoint(tmp_path / "tiny"), bigload.open_checkpoint("memory://models/tiny")
    assert (remote.tensors, remote.config) == (local.tensors, local.config)
    expected = bigload.load(local)
    found = bigload.load(remote, threads=4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    limits = {"cpu": "1GiB"}
    plan = bigload.plan(remote, limits)
    assert plan.device_map == bigload.plan(local, limits).device_map
    assert bigload.verify(bigload.reshard(plan, tmp_path / "out").out).ok


def test_large_ranges_are_read_in_pieces(memory, monkeypatch):
    monkeypatch.setattr(fsspec_files, "_CHUNK_BYTES", 7)
    asked = []
    cat_file = type(memory).cat_file
    monkeypatch.setattr(
        type(memory), "cat_file", lambda *args, **range_: asked.append(range_) or cat_file(*args, **range_)
    )
    source = fsspec_files.FsspecSource(byte_source.Path("memory:/models/tiny/config.json"), byte_source.NO_RECORDER)
    content = byte_source.read_range(source, 3, 30)
    assert content == memory.cat_file("/models/tiny/config.json")[3:30]
    assert asked[:4] == [{"start": start, "end": min(start + 7, 30)} for start in range(3, 30, 7)]


def test_a_short_answer_is_an_error(memory, monkeypatch):
    checkpoint = bigload.open_checkpoint("memory://models/tiny")
    monkeypatch.setattr(type(memory), "cat_file", lambda self, path, start, end: b"x" * (end - start - 1))
    with pytest.raises(ReadError, match="the file ended at byte"):
        bigload.load(checkpoint)


def test_a_file_that_was_replaced_is_an_error(memory):
    checkpoint = bigload.open_checkpoint("memory://models/tiny")
    name = f"/models/tiny/{checkpoint.shards[0].file}"
    memory.pipe_file(name, memory.cat_file(name))
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened"):
        bigload.load(checkpoint)


@pytest.mark.parametrize("path", ["memory://models/none", "memory://models/none.safetensors", "memory://"])
def test_what_is_not_there_is_an_error(memory, path):
    with pytest.raises(CheckpointError, match="memory"):
        bigload.open_checkpoint(path)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (PermissionError("denied at https://h/x?Signature=secret"), AccessDeniedError, "denied at"),
        (RuntimeError("it broke at https://h/x?Signature=secret\nmore"), CheckpointError, "RuntimeError: it broke at"),
    ],
)
def test_errors_of_file_systems_are_told_without_addresses(memory, monkeypatch, error, kind, message):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr(type(memory), "info", fail)
    with pytest.raises(kind, match=message) as caught:
        bigload.open_checkpoint("memory://models/tiny")
    assert "secret" not in str(caught.value)


def test_passwords_in_addresses_are_refused_and_not_repeated(memory):
    with pytest.raises(CheckpointNotFoundError, match="an address with a password") as caught:
        bigload.open_checkpoint("sftp://user:s3cr3t@host/model")
    assert "s3cr3t" not in str(caught.value)


def test_a_client_that_is_not_installed_is_named(memory, monkeypatch):
    implementation = {"class": "no_such_module.System", "err": "no_such_module must be installed"}
    monkeypatch.setitem(known_implementations, "nosuch", implementation)
    with pytest.raises(CheckpointError, match="no_such_module must be installed"):
        bigload.open_checkpoint("nosuch://host/model")


def test_schemes_that_nothing_knows_are_refused_with_those_there_are(memory):
    with pytest.raises(CheckpointNotFoundError, match='no scheme "foo" is known') as caught:
        bigload.open_checkpoint("foo://host/model")
    assert "hf, https, s3, gs, az" in caught.value.hint


def test_a_file_address_is_a_path_of_this_machine(memory, tmp_path):
    assert bigload.open_checkpoint(f"file://{tmp_path}/tiny").root == tmp_path / "tiny"


def test_threads_take_turns_where_a_file_system_may_not_be_shared(memory, monkeypatch):
    busy, overlaps = threading.Lock(), []

    def cat_file(self, path, start, end):
        overlaps.append(not busy.acquire(blocking=False))
        content = bytes(self.store[path].getbuffer()[start:end])
        busy.release()
        return content

    monkeypatch.setattr(fsspec_files, "_THREAD_SAFE", ())
    monkeypatch.setattr(type(memory), "cat_file", cat_file)
    bigload.load("memory://models/tiny", threads=8)
    assert overlaps
    assert not any(overlaps)
