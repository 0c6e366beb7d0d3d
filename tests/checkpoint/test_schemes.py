"""A byte source that is registered from outside, and a checkpoint that is loaded through it from end to end."""

import dataclasses
import threading
from pathlib import Path

import pytest
import torch

import bigload
from bigload.checkpoint.byte_source import SourceIdentity, SourceScheme, register_scheme, scheme_of
from bigload.errors import ReadError, UnsupportedMethodError
from builders import make_checkpoint

OBJECTS, OPEN, READS = {}, set(), []


class MemorySource:
    def __init__(self, location, recorder):
        if str(location) not in OBJECTS:
            raise ReadError(location, "no such object")
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
        raise ReadError(location, "no such object")
    content = OBJECTS[str(location)]
    return SourceIdentity(num_bytes=len(content), version=(hash(content),))


register_scheme(SourceScheme(name="memory", open=MemorySource, identity=identity))


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint whose headers were read from a folder that is gone, and whose files are in memory."""
    opened = bigload.open_checkpoint(make_checkpoint(tmp_path / "tiny"))
    expected = bigload.load(opened)
    OBJECTS.clear()
    READS.clear()
    root = Path("memory://tiny")
    for shard in opened.shards:
        path = tmp_path / "tiny" / shard.file
        OBJECTS[str(root / shard.file)] = path.read_bytes()
        path.unlink()
    return dataclasses.replace(opened, root=root), expected


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
    name = next(iter(OBJECTS))
    OBJECTS[name] += b"more"
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened"):
        bigload.load(checkpoint[0])
    assert not OPEN


def test_an_object_that_is_replaced_meanwhile_is_refused(checkpoint):
    def replace(progress):
        name = next(iter(OBJECTS))
        OBJECTS[name] += b"more"

    with pytest.raises(ReadError, match="it changed while it was being loaded"):
        bigload.load(checkpoint[0], on_progress=replace, threads=1)
    assert not OPEN


def test_an_object_that_is_gone_is_an_error_of_its_location(checkpoint):
    del OBJECTS[next(iter(OBJECTS))]
    with pytest.raises(ReadError, match=r"memory:/tiny.*no such object"):
        bigload.load(checkpoint[0])


@pytest.mark.parametrize("path", ["model.safetensors", "/a/b", "a:b", "unknown:/x"])
def test_all_else_is_a_local_file(path):
    assert scheme_of(Path(path)).name == "file"
