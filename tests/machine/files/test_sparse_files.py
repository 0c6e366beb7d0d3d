import errno
import os
from contextlib import contextmanager

import pytest

from bigload.machine.files.sparse_files import data_extents

PAGE = 1 << 20


@contextmanager
def opened(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def extents(path, start, stop):
    with opened(path) as descriptor:
        return list(data_extents(descriptor, start, stop))


@pytest.fixture
def holey(tmp_path):
    """1 MiB of hole, 1 MiB of data, 2 MiB of hole."""
    path = tmp_path / "holey"
    with path.open("wb") as file:
        file.seek(PAGE)
        file.write(b"x" * PAGE)
        file.truncate(4 * PAGE)
    if path.stat().st_blocks * 512 >= 2 * PAGE:
        pytest.skip("this file system stores holes")
    return path


def test_only_what_is_stored_is_an_extent(holey):
    assert extents(holey, 0, 4 * PAGE) == [(PAGE, 2 * PAGE)]


def test_extents_are_cut_to_the_range_asked_for(holey):
    assert extents(holey, PAGE + 5, 2 * PAGE - 7) == [(PAGE + 5, 2 * PAGE - 7)]
    assert extents(holey, PAGE - 5, PAGE + 5) == [(PAGE, PAGE + 5)]


def test_a_range_inside_a_hole_has_no_extent(holey):
    assert extents(holey, 10, 20) == []
    assert extents(holey, 3 * PAGE, 4 * PAGE) == []


def test_an_empty_range_has_no_extent(holey):
    assert extents(holey, PAGE, PAGE) == []


def test_a_file_without_holes_is_one_extent(tmp_path):
    (tmp_path / "full").write_bytes(b"x" * 1000)
    assert extents(tmp_path / "full", 0, 1000) == [(0, 1000)]


def test_a_range_past_the_end_has_no_extent(tmp_path):
    (tmp_path / "short").write_bytes(b"x")
    assert extents(tmp_path / "short", 5, 10) == []


def test_what_cannot_be_asked_raises(tmp_path):
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            list(data_extents(read_end, 0, 10))
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_file_system_that_cannot_tell_holes_has_data_everywhere(holey, monkeypatch):
    def unsupported(*_):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr("os.lseek", unsupported)
    assert extents(holey, 5, 4 * PAGE) == [(5, 4 * PAGE)]
