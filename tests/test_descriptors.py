"""Reads at an offset, by the calls that every system has."""

import os
import threading

import pytest

from bigload.descriptors import READING, READING_AT_ONCE, read_at

CONTENT = bytes(range(256)) * 40


@pytest.fixture(params=["preadv", "without preadv"])
def descriptor(request, tmp_path, monkeypatch):
    if request.param != "preadv":
        monkeypatch.delattr(os, "preadv")
    (tmp_path / "file").write_bytes(CONTENT)
    descriptor = os.open(tmp_path / "file", READING)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("offset", [0, 1, 5000, len(CONTENT) - 10, len(CONTENT), len(CONTENT) + 5])
def test_buffers_are_filled_one_after_the_other_as_far_as_the_file_goes(descriptor, offset):
    buffers = [memoryview(bytearray(size)) for size in (3, 0, 1000, 4)]
    count = read_at(descriptor, buffers, offset)
    assert b"".join(buffers)[:count] == CONTENT[offset : offset + 1007]
    assert count == len(CONTENT[offset : offset + 1007])


def test_threads_do_not_move_the_position_of_each_other(descriptor):
    wrong = []

    def read(start):
        for offset in range(start, start + 4000, 7):
            buffer = memoryview(bytearray(64))
            if read_at(descriptor, [buffer], offset) != 64 or buffer != CONTENT[offset : offset + 64]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(start,)) for start in (0, 1500, 3000, 4500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_fifo_is_opened_without_waiting_for_a_writer(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    os.close(os.open(tmp_path / "fifo", READING_AT_ONCE))
