"""A byte source that is registered from outside, and a checkpoint that is loaded through it from end to end."""

import threading
from pathlib import Path

import pytest
import torch

import bigload
from bigload.checkpoint.byte_source import SourceIdentity, SourceScheme, register_scheme, scheme_of
from bigload.errors import CheckpointError, InvalidCheckpointError, ReadError, UnsupportedMethodError
from builders import make_checkpoint

OBJECTS, OPEN, READS = {}, set(), []


class MemorySource:
    def __init__(self, location, recorder):
        if str(location) not in OBJECTS:
            raise ReadError(location, "no such object") from FileNotFoundError()
        self.location, self.content = location, OBJECTS[str(location)]
        OPEN.add(self)

    def read_into(self, buffers, offset):
        READS.append(threading.current_thread().name)
        for buffer in buffers:
            if offset + buffer.nbytes > len(self.content):
                raise ReadError(self.location, f"it ended at byte {len(self.content)}")
            buffer[:] = self.content[offset : offset + buffer.nbytes]
            offset += buffer.nbytes

    def close(self):
        OPEN.remove(self)


def identity(location):
    if str(location) not in OBJECTS:
        raise ReadError(location, "no such object") from FileNotFoundError()
    content = OBJECTS[str(location)]
    return SourceIdentity(num_bytes=len(content), version=(hash(content),))


register_scheme(SourceScheme(name="memory", open=MemorySource, identity=identity))


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose files are in memory, and its tensors."""
    folder = make_checkpoint(tmp_path / "tiny", shards=3)
    expected = bigload.load(folder)
    OBJECTS.clear()
    OBJECTS.update({str(Path("memory://tiny") / path.name): path.read_bytes() for path in folder.iterdir()})
    remote = bigload.open_checkpoint("memory://tiny")
    READS.clear()
    return remote, expected


def test_headers_index_and_config_are_read_through_the_scheme(checkpoint, tmp_path):
    remote, _ = checkpoint
    local = bigload.open_checkpoint(tmp_path / "tiny")
    assert (remote.shards, remote.tensors, remote.config) == (local.shards, local.tensors, local.config)
    assert not OPEN
    assert bigload.open_checkpoint(f"memory://tiny/{local.index_file}").tensors == local.tensors
    part = bigload.open_checkpoint(f"memory://tiny/{local.shards[1].file}")
    assert part.tensors.items() < local.tensors.items()
    assert bigload.plan("memory://tiny", {"cpu": "1GiB"}).shards == bigload.plan(local, {"cpu": "1GiB"}).shards


def test_a_header_that_breaks_its_format_names_the_file(checkpoint):
    name = next(name for name in OBJECTS if name.endswith(".safetensors"))
    OBJECTS[name] = b"{}"
    with pytest.raises(InvalidCheckpointError, match=r"2 bytes, a safetensors file has at least 8") as caught:
        bigload.open_checkpoint("memory://tiny/")
    assert caught.value.problems[0].file == Path(name).name


@pytest.mark.parametrize("path", ["memory://other", "memory://other/model.bin", "memory://other/index.json"])
def test_a_location_without_a_checkpoint_is_an_error(checkpoint, path):
    with pytest.raises(CheckpointError, match="other"):
        bigload.open_checkpoint(path)


@pytest.mark.parametrize("options", [{}, {"threads": 3}, {"dtype": "float32"}, {"device": {"": "cpu"}}])
def test_a_checkpoint_is_loaded_through_a_scheme_that_was_registered_from_outside(checkpoint, options):
    remote, expected = checkpoint
    found = bigload.load(remote, **options)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype))
    assert found.report.reason == "locations of the scheme memory are read by byte ranges"
    assert READS
    assert not OPEN


@pytest.mark.parametrize("method", ["direct", "mmap"])
def test_methods_of_local_files_are_refused(checkpoint, method):
    with pytest.raises(UnsupportedMethodError, match="the scheme memory"):
        bigload.load(checkpoint[0], method=method)


def test_an_object_that_was_replaced_since_it_was_opened_is_refused(checkpoint):
    name = next(name for name in OBJECTS if name.endswith(".safetensors"))
    OBJECTS[name] += b"more"
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened"):
        bigload.load(checkpoint[0])
    assert not OPEN


def test_an_object_that_is_replaced_meanwhile_is_refused(checkpoint):
    def replace(progress):
        name = next(name for name in OBJECTS if name.endswith(".safetensors"))
        OBJECTS[name] += b"more"

    with pytest.raises(ReadError, match="it changed while it was being loaded"):
        bigload.load(checkpoint[0], on_progress=replace, threads=1)
    assert not OPEN


def test_an_object_that_is_gone_is_an_error_of_its_location(checkpoint):
    del OBJECTS[next(name for name in OBJECTS if name.endswith(".safetensors"))]
    with pytest.raises(ReadError, match=r"memory:/tiny.*no such object"):
        bigload.load(checkpoint[0])


@pytest.mark.parametrize("path", ["model.safetensors", "/a/b", "a:b", "unknown:/x"])
def test_all_else_is_a_local_file(path):
    assert scheme_of(Path(path)).name == "file"
