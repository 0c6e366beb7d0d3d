"""Bytes of a remote file that windows share are kept, within a bound, and none is taken for kept that is not."""

import random

import pytest

from bigload.layouts.writing import recent_bytes
from bigload.layouts.writing.recent_bytes import KeptExtents, RecentBytes, RecentReader
from bigload.machine.threads.thread_pool import run_jobs
from builders import open_descriptors

CONTENT = random.Random(5).randbytes(200_000)


class Source:
    def __init__(self):
        self.num_bytes = 0

    def read_into(self, buffers, offset):
        for buffer in buffers:
            buffer[:] = CONTENT[offset : offset + len(buffer)]
            offset += len(buffer)
            self.num_bytes += len(buffer)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(recent_bytes, "RECENT_BYTES", 20_000)
    monkeypatch.setattr(recent_bytes, "MAX_GAP_BYTES", 500)


@pytest.fixture
def reader():
    recent = RecentBytes()
    yield RecentReader(Source(), recent)
    recent.close()


@pytest.mark.parametrize("seed", range(10))
def test_reads_in_any_order_are_the_bytes_of_the_source(reader, seed):
    choose = random.Random(seed)
    at = 0
    for _ in range(300):
        at = max(0, min(at + choose.randrange(-15_000, 15_000), 190_000))
        buffers = [bytearray(choose.randrange(1, 3000)) for _ in range(3)]
        reader.read_into([memoryview(buffer) for buffer in buffers], at)
        assert b"".join(buffers) == CONTENT[at : at + sum(map(len, buffers))]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_extents_do_not_overlap_and_are_bounded(seed):
    choose, extents, kept = random.Random(seed), KeptExtents(), set()
    for _ in range(200):
        start = choose.randrange(100_000)
        stop = start + choose.randrange(1, 9000)
        kept |= set(range(*extents.missing(start, stop)))
        assert set(range(start, stop)) <= kept
        for dropped in extents.drop():
            kept -= set(range(*dropped))
        assert kept == {byte for pair in extents.pairs for byte in range(*pair)}
        assert len(kept) <= 20_500


def test_rows_that_take_turns_are_fetched_once(reader):
    for first in range(0, 100_000, 10_000):
        for column in range(4):
            for start in range(first + 250 * column, first + 10_000, 1000):
                reader.read_into([memoryview(bytearray(250))], start)
    assert reader._source.num_bytes <= 100_000


def test_threads_have_bytes_of_their_own_and_memory_goes_back():
    before, recent, source = open_descriptors(), RecentBytes(), Source()
    reader = RecentReader(source, recent)

    def work(number):
        buffer = bytearray(1000)
        reader.read_into([memoryview(buffer)], 1000 * number)
        assert buffer == CONTENT[1000 * number : 1000 * number + 1000]

    run_jobs(work, range(100), threads=4)
    recent.close()
    assert open_descriptors() == before
