"""Reads that follow each other are served from one response; every thread has its own, and few of them."""

import random
import threading
from pathlib import Path

import pytest

from bigload.checkpoint.byte_source import expect_reads, scheme_of
from bigload.checkpoint.sources.range_streams import LEAST_STREAM_BYTES, MAX_GAP_BYTES, MAX_STREAMS_OF_THREAD, Shares
from bigload.errors import ReadError
from bigload.machine.threads.activities import NO_RECORDER
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import MIB

CONTENT = random.Random(3).randbytes(4 * MIB)


@pytest.fixture
def location(served, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.bin").write_bytes(CONTENT)
    return Path(served.serve("files", tmp_path / "files")) / "a.bin"


def read(source, start, stop):
    buffer = bytearray(stop - start)
    source.read_into([memoryview(buffer)[:1], memoryview(buffer)[1:]], start)
    assert buffer == CONTENT[start:stop]


def ranges_asked(served):
    return [request.headers["range"].removeprefix("bytes=") for request in served.requests]


def test_expected_reads_are_one_request(served, source):
    expect_reads(source, [(start, start + 1000) for start in range(1000, 50_000, 1000)])
    for start in range(1000, 50_000, 1000):
        read(source, start, start + 1000)
    assert ranges_asked(served) == ["1000-49999"]
    assert served.num_bytes == 49_000


def test_small_gaps_are_read_over_and_large_ones_are_not(served, source):
    far = 30_000 + MAX_GAP_BYTES + 1
    expect_reads(source, [(0, 10_000), (20_000, 30_000), (far, far + 10)])
    for start, stop in ((0, 10_000), (20_000, 30_000), (far, far + 10)):
        read(source, start, stop)
    assert ranges_asked(served) == ["0-29999", f"{far}-{far + 9}"]


def test_a_read_that_was_not_expected_is_a_request_of_its_own(served, source):
    expect_reads(source, [(0, 10_000)])
    read(source, 2_000_000, 2_000_010)
    read(source, 0, 10_000)
    read(source, 5_000, 6_000)  # back: a response is not rewound
    assert ranges_asked(served) == ["2000000-2000009", "0-9999", "5000-9999"]


def test_a_thread_keeps_few_responses_open(served, location):
    sources = [scheme_of(location).open(location, NO_RECORDER) for _ in range(MAX_STREAMS_OF_THREAD + 1)]
    for turn in range(2):
        for source in sources:
            expect_reads(source, [(0, 4 * MIB)])
            read(source, 100 * turn, 100 * turn + 100)
    assert len(served.requests) == 2 * len(sources)  # each was closed for another when its turn came again
    for source in sources:
        source.close()


def test_threads_have_responses_of_their_own(served, source):
    def part(number):
        begin = number * MIB
        expect_reads(source, [(begin, begin + MIB)])
        for start in range(begin, begin + MIB, MIB // 8):
            read(source, start, start + MIB // 8)

    run_jobs(part, range(4), threads=4)
    assert sorted(ranges_asked(served)) == sorted(f"{at * MIB}-{(at + 1) * MIB - 1}" for at in range(4))
    assert served.num_bytes == len(CONTENT)


def test_a_response_that_is_cut_off_continues_with_all_that_was_expected(served, source):
    served.fault("plain", cut_after=250_000)
    expect_reads(source, [(0, 1_000_000)])
    for start in range(0, 1_000_000, 100_000):
        read(source, start, start + 100_000)
    assert ranges_asked(served) == ["0-999999", "250000-999999"]
    assert served.num_bytes == 1_000_000


def test_a_response_that_is_not_used_to_its_end_closes_with_the_source(served, location):
    source = scheme_of(location).open(location, NO_RECORDER)
    expect_reads(source, [(0, 4 * MIB)])
    read(source, 0, 100)
    source.close()
    assert served.num_bytes <= 4 * MIB


def test_an_error_does_not_wait_for_threads_that_wait_for_a_server(served, source):
    """Nor do they touch memory when the bytes come at last."""
    is_slow, go_on = threading.Event(), threading.Event()
    buffer = bytearray(100)

    def pause():
        is_slow.set()
        go_on.wait(60)

    served.fault("plain", pause=pause)

    def work(number):
        if number == 0:
            source.read_into([memoryview(buffer)], 0)
            buffer[0] = 1
        is_slow.wait(60)
        raise ReadError("another", "failed")

    before = set(threading.enumerate())
    with pytest.raises(ReadError, match="another"):
        run_jobs(work, range(2), threads=2)
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name == "bigload-0"]
    go_on.set()
    for thread in left:
        thread.join(60)
    assert left
    assert buffer == bytes(100)


def test_shares_become_smaller_towards_the_end_down_to_what_is_worth_a_request():
    shares, sizes = Shares(4000 * MIB, threads=16, most=64 * MIB), []
    while sum(sizes) < 4000 * MIB:
        sizes.append(min(shares.next_bytes, 4000 * MIB - sum(sizes)))
        shares.take(sizes[-1])
    assert sizes[0] == 64 * MIB
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes[-16:-1]) == {LEAST_STREAM_BYTES}
    assert len(sizes) < 160


def test_shares_of_little_are_for_all_threads():
    assert Shares(16 * MIB, threads=4).next_bytes == 2 * MIB
    assert Shares(0, threads=4).next_bytes == 0
