"""Files of servers without byte ranges: transferred once, whatever the order of reads, and kept within limits."""

import os
import random
import threading
from pathlib import Path

import pytest
from plain_server import served_plainly

import bigload
from bigload.checkpoint.byte_source import WholeFilesWarning, expect_reads, scheme_of
from bigload.checkpoint.source import open_checkpoint
from bigload.checkpoint.sources import whole_files
from bigload.checkpoint.sources.ranged_source import MAX_FRUITLESS_TRIES
from bigload.errors import ReadError
from bigload.machine.threads.activities import NO_RECORDER
from bigload.machine.threads.thread_pool import run_jobs
from bigload.units import KIB, MIB
from builders import make_checkpoint, open_descriptors, write_raw
from hub_server import Fault

CONTENT = random.Random(3).randbytes(4 * MIB)


@pytest.fixture
def location(served, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/a.bin").write_bytes(CONTENT)
    served.fault("plain", no_ranges=True, times=-1)
    return Path(served.serve("files", tmp_path / "files")) / "a.bin"


def read(source, start, stop):
    buffer = bytearray(stop - start)
    source.read_into([memoryview(buffer)[:1], memoryview(buffer)[1:]], start)
    assert buffer == CONTENT[start:stop]


def bodies(served):
    """How many bytes of the file each GET brought, without those that were closed at their beginning."""
    return [request.num_bytes for request in served.requests if request.method == "GET" and request.num_bytes]


ignored = pytest.mark.filterwarnings("ignore::bigload.checkpoint.byte_source.WholeFilesWarning")


@ignored
@pytest.mark.parametrize("first", [0, 1, 3 * MIB])
def test_reads_in_any_order_are_served_by_one_response(served, source, first):
    starts = [first, *range(0, 4 * MIB - MIB // 8, MIB // 8)]
    random.Random(5).shuffle(starts)
    expect_reads(source, [(start, start + MIB // 8) for start in starts])
    read(source, 4 * MIB - 10, 4 * MIB)
    served.requests.clear()
    for start in starts:
        read(source, start, start + MIB // 8)
    assert not served.requests


@ignored
def test_threads_share_one_response(served, source):
    def part(number):
        begin = number * MIB // 2
        expect_reads(source, [(begin, begin + MIB // 2)])
        for start in range(begin, begin + MIB // 2, MIB // 16):
            read(source, start, start + MIB // 16)

    run_jobs(part, range(8), threads=4)
    # Up to four requests told the threads that there are no ranges; a buffer of each was sent.
    assert sum(count == len(CONTENT) for count in bodies(served)) <= 5
    served.requests.clear()
    run_jobs(part, range(8), threads=4)
    assert not served.requests


def read_data(location):
    source = scheme_of(location).open(location, NO_RECORDER)
    expect_reads(source, [(5, 10)])
    read(source, 5, 10)
    source.close()


def test_a_server_is_named_once(location):
    host = str(location).split("/")[1]
    with pytest.warns(WholeFilesWarning, match=f"^{host} does not support byte ranges: whole files are read$"):
        read_data(location)
    read_data(location)  # a warning would be an error here


def test_headers_are_the_beginning_of_a_response_and_warn_of_nothing(location, source):
    read(source, 0, 100)
    read(source, 50_000, 60_000)


@ignored
def test_a_response_that_is_cut_off_is_begun_anew_and_goes_on_where_it_stopped(served, source):
    served.faults[:] = [
        Fault("plain", no_ranges=True),  # says that there are no ranges
        Fault("plain", no_ranges=True, cut_after=MIB),
        Fault("plain", no_ranges=True, times=-1),
    ]
    expect_reads(source, [(0, 4 * MIB)])
    read(source, 100, 4 * MIB)
    assert bodies(served)[-2:] == [MIB, 4 * MIB]


@ignored
def test_only_answers_that_bring_nothing_new_count_as_failures(served, source):
    served.faults[:] = [Fault("plain", no_ranges=True), Fault("plain", no_ranges=True, cut_after=MIB, times=-1)]
    expect_reads(source, [(0, 4 * MIB)])
    with pytest.raises(
        ReadError, match=rf"a\.bin: the connection to .* failed: .*, {MAX_FRUITLESS_TRIES} times in a row"
    ):
        read(source, 10, 2 * MIB)


@ignored
def test_what_is_kept_is_bounded_and_what_is_dropped_comes_again(served, location, monkeypatch):
    monkeypatch.setattr(whole_files, "MAX_KEPT_BYTES", MIB)
    monkeypatch.setattr(whole_files, "ROOM_CHECKED_BYTES", 256 * KIB)
    source, other = (scheme_of(location).open(location, NO_RECORDER) for _ in range(2))
    for each in (source, other):
        expect_reads(each, [(0, 4 * MIB)])
        for start in range(0, 4 * MIB, MIB // 4):
            read(each, start, start + MIB // 4)
            kept = sum(file._end - file._begin for file in whole_files._open_files)
            assert kept <= 2 * MIB
            on_disk = sum(os.fstat(file._file.fileno()).st_blocks * 512 for file in whole_files._open_files)
            assert on_disk <= 2.5 * MIB
    for start in (0, 3 * MIB, MIB, 0):
        read(source, start, start + MIB)
        read(other, start, start + MIB)
    source.close()
    other.close()
    assert not whole_files._open_files


@ignored
def test_few_responses_are_open_at_once_and_those_that_are_closed_go_on(served, location, monkeypatch):
    monkeypatch.setattr(whole_files, "MAX_RESPONSES", 3)
    sources = [scheme_of(location).open(location, NO_RECORDER) for _ in range(6)]
    for start in range(0, 4 * MIB, MIB):
        for source in sources:
            expect_reads(source, [(start, start + MIB)])
            read(source, start, start + MIB)
            assert sum(file._stream.is_open for file in whole_files._open_files) <= 3
    for source in sources:
        source.close()


@ignored
def test_nothing_is_left_when_a_source_closes(served, location, tmp_path):
    before = open_descriptors()
    source = scheme_of(location).open(location, NO_RECORDER)
    expect_reads(source, [(0, MIB)])
    read(source, 5, MIB)
    assert not [path for path in (tmp_path / "cache/bigload").rglob("*") if path.is_file()]  # it has no name
    source.close()
    source.close()
    assert len([each for each in open_descriptors() if "bigload" in each]) == len(
        [each for each in before if "bigload" in each]
    )


@ignored
def test_a_disk_that_refuses_is_an_error_that_says_where(location, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    source = scheme_of(location).open(location, NO_RECORDER)
    expect_reads(source, [(0, MIB)])
    with pytest.raises(ReadError, match=r"its bytes are kept in .*file/bigload meanwhile: Not a directory") as caught:
        read(source, 5, MIB)
    assert "XDG_CACHE_HOME" in caught.value.hint


@ignored
@pytest.mark.parametrize("size", [len(CONTENT), len(CONTENT) - 1])
def test_a_file_that_is_replaced_between_two_responses_is_an_error(served, source, tmp_path, size):
    read(source, 0, 10)
    (tmp_path / "files/a.bin").write_bytes(bytes(size))
    expect_reads(source, [(0, MIB)])
    with pytest.raises(ReadError, match="it changed since the checkpoint was opened"):
        read(source, 10, MIB)


@ignored
def test_a_file_that_is_replaced_is_known_by_its_time_where_there_is_no_etag(served, tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(CONTENT)
    with served_plainly(tmp_path) as server:
        location = Path(server.url) / "a.bin"
        before = scheme_of(location).identity(location)
        source = scheme_of(location).open(location, NO_RECORDER)
        read(source, 0, 10)
        os.utime(path, (1, 1))
        expect_reads(source, [(0, MIB)])
        with pytest.raises(ReadError, match="it changed since the checkpoint was opened: Last-Modified"):
            read(source, 10, MIB)
        source.close()
        assert scheme_of(location).identity(location) != before


def test_a_server_that_has_ranges_after_all_is_asked_for_them_again(served, location):
    scheme = scheme_of(location)
    scheme.identity(location)
    assert scheme.server_without_ranges(location) in str(location)
    served.faults.clear()
    source = scheme.open(location, NO_RECORDER)
    read(source, 0, 10)
    assert scheme.server_without_ranges(location) is None
    expect_reads(source, [(MIB, MIB + 10)])
    read(source, MIB, MIB + 10)
    assert [request.status for request in served.requests] == [200, 206, 206]
    source.close()


@ignored
@pytest.mark.parametrize("refused", [403, 405, 501])
def test_a_server_that_refuses_head_is_asked_otherwise(served, location, refused):
    scheme = scheme_of(location)
    before = scheme.identity(location)
    served.faults.insert(0, served.fault("plain", status=refused))
    assert scheme.identity(location) == before
    assert [request.method for request in served.requests] == ["GET", "HEAD", "GET"]


@ignored
def test_an_error_does_not_wait_for_threads_that_wait_for_a_server(served, source):
    """Whether a thread waits for the response or for its turn."""
    is_slow, go_on = threading.Event(), threading.Event()

    def pause():
        is_slow.set()
        go_on.wait(60)

    served.faults[0].pause = pause

    def work(number):
        if number < 2:
            expect_reads(source, [(0, MIB)])
            read(source, 10, MIB)
        is_slow.wait(60)
        raise ReadError("another", "failed")

    before = set(threading.enumerate())
    with pytest.raises(ReadError, match="another"):
        run_jobs(work, range(3), threads=3)
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name[:8] == "bigload-"]
    source.close()
    go_on.set()
    for thread in left:
        thread.join(60)
    assert left
    assert not whole_files._open_files


def test_a_server_that_does_not_say_how_large_files_are_is_an_error(served, tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    with served_plainly(tmp_path) as server:
        location = Path(server.url) / "a.bin"
        server.hides_sizes = True
        with pytest.raises(ReadError, match="does not say how large it is") as caught:
            scheme_of(location).identity(location)
        assert "download the files" in caught.value.hint
        source = scheme_of(location).open(location, NO_RECORDER)
        with pytest.raises(ReadError, match="no byte ranges, and does not say how large the file is") as caught:
            read(source, 5, 10)
        assert "download the files" in caught.value.hint


def test_a_checkpoint_is_opened_by_the_beginnings_of_its_files(served, tmp_path):
    """And a plan is made of that: no file is transferred, though connections hold some of what nobody reads."""
    folder = make_checkpoint(tmp_path / "model", shards=2)
    header = {"big": {"dtype": "U8", "shape": [256 * MIB], "data_offsets": [0, 256 * MIB]}}
    (tmp_path / "big").mkdir()
    big = write_raw(tmp_path / "big/model.safetensors", header)
    os.truncate(big, big.stat().st_size + 256 * MIB)
    with served_plainly(tmp_path) as server:
        opened = open_checkpoint(f"{server.url}/model")
        planned = bigload.plan(f"{server.url}/big", {"cpu": "1GiB"})
    assert opened.tensors == open_checkpoint(folder).tensors
    assert planned.device_map == {"big": "cpu"}
    assert sum(server.bytes_of("big/model.safetensors")) < 64 * MIB
