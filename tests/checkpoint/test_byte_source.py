import mmap
import os
import resource
from itertools import islice

import pytest

from bigload.checkpoint.byte_source import PositionalReader
from bigload.errors import LoadError, ReadError
from bigload.machine.files.page_cache import cached_bytes, evict
from builders import open_descriptors


def views_of(buffer, *sizes):
    view, start, views = memoryview(buffer), 0, []
    for size in sizes:
        views.append(view[start : start + size])
        start += size
    return views


def file_of(path, content):
    path.write_bytes(content)
    return path


def test_buffers_are_filled_one_after_the_other_from_the_offset(tmp_path):
    buffer = bytearray(7)
    with PositionalReader(file_of(tmp_path / "file", b"0123456789")) as reader:
        reader.read_into(views_of(buffer, 2, 0, 5), 2)
    assert buffer == b"2345678"


def test_more_buffers_than_the_system_takes_at_once_are_filled(tmp_path):
    num_buffers = 2 * os.sysconf("SC_IOV_MAX") + 3
    content = bytes(index % 251 for index in range(3 * num_buffers))
    buffer = bytearray(len(content))
    with PositionalReader(file_of(tmp_path / "file", content)) as reader:
        reader.read_into(views_of(buffer, *[3] * num_buffers), 0)
    assert buffer == content


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8])
def test_reads_that_come_back_short_are_continued(tmp_path, monkeypatch, most):
    def short_preadv(descriptor, buffers, offset):
        wanted = sum(len(buffer) for buffer in buffers)
        piece = os.pread(descriptor, min(most, wanted), offset)
        bytes_left = iter(piece)
        for buffer in buffers:
            part = bytes(islice(bytes_left, len(buffer)))
            buffer[: len(part)] = part
        return len(piece)

    reader = PositionalReader(file_of(tmp_path / "file", b"abcdefghijklmnop"))
    monkeypatch.setattr(os, "preadv", short_preadv)
    buffer = bytearray(14)
    reader.read_into(views_of(buffer, 3, 1, 6, 4), 1)
    reader.close()
    assert buffer == b"bcdefghijklmno"


def test_what_is_expected_comes_into_the_page_cache_and_nothing_that_follows(tmp_path):
    page = mmap.PAGESIZE
    path = file_of(tmp_path / "file", bytes(256 * page))
    if evict([path]) != 0:
        pytest.skip("the file system keeps what it has cached")
    with PositionalReader(path) as reader:
        reader.expect([(64 * page, 66 * page)])
        for number in (64, 128, 130, 132, 134):  # the last ones in a row, where systems read ahead
            reader.read_into([memoryview(bytearray(2 * page))], number * page)
    assert cached_bytes(path) == 5 * 2 * page


def test_a_file_that_ends_early_says_where_and_how_much_is_missing(tmp_path):
    reader = PositionalReader(file_of(tmp_path / "file", b"0123456789"))
    with reader, pytest.raises(ReadError, match=r"ended at byte 10, 3 bytes too early") as caught:
        reader.read_into(views_of(bytearray(9), 4, 5), 4)
    assert caught.value.path == tmp_path / "file"


def test_nothing_to_fill_reads_nothing_even_past_the_end(tmp_path):
    with PositionalReader(file_of(tmp_path / "file", b"")) as reader:
        reader.read_into([], 0)
        reader.read_into([memoryview(bytearray())], 1000)


def test_a_missing_file_is_a_read_error_that_names_it(tmp_path):
    with pytest.raises(ReadError, match="No such file") as caught:
        PositionalReader(tmp_path / "gone")
    assert caught.value.path == tmp_path / "gone"
    assert isinstance(caught.value, LoadError | OSError)


def test_what_the_system_refuses_is_a_read_error_with_the_offset(tmp_path):
    reader = PositionalReader(file_of(tmp_path / "file", b"0123"))
    with reader, pytest.raises(ReadError, match=r"Invalid argument at byte -5"):
        reader.read_into(views_of(bytearray(4), 4), -5)


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_opened_and_a_fifo_is_not_waited_for(tmp_path, put):
    before = open_descriptors()
    put(tmp_path / "file")
    with pytest.raises(ReadError, match="not a regular file"):
        PositionalReader(tmp_path / "file")
    assert open_descriptors() == before


def test_leaving_the_block_closes_the_file(tmp_path):
    before = open_descriptors()
    with PositionalReader(file_of(tmp_path / "file", b"0123")):
        assert len(open_descriptors()) == len(before) + 1
    assert open_descriptors() == before


def test_too_many_open_files_are_told_with_what_to_do(tmp_path):
    path = file_of(tmp_path / "file", b"0123")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(path, os.O_RDONLY)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(ReadError, match="ulimit -n"):
            PositionalReader(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(lowest)
