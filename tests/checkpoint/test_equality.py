import errno
import os

import pytest

from bigload.checkpoint import equality
from bigload.checkpoint.equality import FULL_COMPARISON_BYTES, stored_equal
from bigload.checkpoint.source import open_checkpoint
from bigload.errors import CheckpointError
from builders import header_of, open_descriptors, write_index, write_raw

SMALL, LARGE = 3 * 2**20, 64 * 2**20


def pair(folder, num_bytes, *, changes=(), b_form=None):
    """Two tensors of zeros in a file of their own each; `changes` are offsets in `b` that hold a one."""
    folder.mkdir(exist_ok=True)
    forms = {"a": ("U8", [num_bytes]), "b": b_form or ("U8", [num_bytes])}
    for name, form in forms.items():
        path = write_raw(folder / f"{name}.safetensors", header_of({name: form}))
        start = path.stat().st_size
        os.truncate(path, start + num_bytes)
        with path.open("r+b") as file:
            for offset in changes if name == "b" else ():
                file.seek(start + offset)
                file.write(b"\1")
    write_index(folder, {name: f"{name}.safetensors" for name in forms})
    return open_checkpoint(folder)


@pytest.mark.parametrize("num_bytes", [0, 1, SMALL, FULL_COMPARISON_BYTES, LARGE])
def test_tensors_of_the_same_bytes_are_equal(tmp_path, num_bytes):
    assert stored_equal(pair(tmp_path, num_bytes), ["a", "b"])


@pytest.mark.parametrize("offset", [0, 1, 2**20 - 1, 2**20, SMALL // 2, SMALL - 1])
def test_a_single_byte_is_seen_in_tensors_that_are_compared_in_full(tmp_path, offset):
    assert not stored_equal(pair(tmp_path, SMALL, changes=[offset]), ["a", "b"])


@pytest.mark.parametrize("offset", [0, LARGE - 1])
def test_the_first_and_the_last_byte_of_a_large_tensor_are_compared(tmp_path, offset):
    assert not stored_equal(pair(tmp_path, LARGE, changes=[offset]), ["a", "b"])


def test_a_large_tensor_that_is_other_throughout_is_other(tmp_path):
    changes = range(2**20, LARGE - 2**20, 50_000)
    assert not stored_equal(pair(tmp_path, LARGE, changes=changes), ["a", "b"])


def test_large_tensors_are_read_by_samples(tmp_path, monkeypatch):
    lengths = []

    def counted(descriptor, buffers, start, preadv=os.preadv):
        lengths.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, start)

    checkpoint = pair(tmp_path, LARGE)
    monkeypatch.setattr(os, "preadv", counted)
    assert stored_equal(checkpoint, ["a", "b"])
    assert sum(lengths) == 2 * equality.NUM_SAMPLES * equality.SAMPLE_BYTES


def test_one_that_differs_among_several_is_seen(tmp_path):
    checkpoint = pair(tmp_path, 8, changes=[3])
    assert stored_equal(checkpoint, ["a", "a"])
    assert not stored_equal(checkpoint, ["a", "a", "b"])


@pytest.mark.parametrize("form", [("I8", [8]), ("U8", [4, 2])])
def test_tensors_of_another_dtype_or_shape_are_not_equal(tmp_path, form):
    assert not stored_equal(pair(tmp_path, 8, b_form=form), ["a", "b"])


def test_a_file_that_is_gone_is_named(tmp_path):
    checkpoint = pair(tmp_path, 8)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        stored_equal(checkpoint, ["a", "b"])


@pytest.mark.parametrize("num_bytes", [SMALL, LARGE])
def test_a_file_that_was_cut_off_is_named(tmp_path, num_bytes):
    checkpoint = pair(tmp_path, num_bytes)
    os.truncate(tmp_path / "b.safetensors", num_bytes // 2)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: the file ended at byte"):
        stored_equal(checkpoint, ["a", "b"])


def test_a_read_that_fails_is_reported_and_leaves_no_file_open(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    checkpoint, before = pair(tmp_path, 8), open_descriptors()
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        stored_equal(checkpoint, ["a", "b"])
    assert len(open_descriptors()) == len(before)
