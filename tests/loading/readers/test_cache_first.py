import os

import pytest

from bigload.errors import ReadError
from bigload.loading.readers.direct import CacheFirstReader, direct_alignment
from bigload.machine.activities import Phase, Recorder
from bigload.machine.page_cache import cached_bytes, evict
from builders import open_descriptors

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def half(tmp_path):
    """A file of 64 pages of which the first 32 are cached, where the file system has direct reads."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * PAGE))
    if direct_alignment(path) is None or evict([path]):
        pytest.skip("the tests' file system has no direct reads, or keeps its files in memory")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(descriptor, 32 * PAGE, 0)
    os.close(descriptor)
    return path


def read(path, start, num_bytes):
    """Return the bytes, and whether they were copied out of a block of a direct read."""
    recorder = Recorder(is_tracing=True)
    reader = CacheFirstReader(path, recorder=recorder)
    first, second = bytearray(7), bytearray(num_bytes - 7)
    reader.read_into([memoryview(first), memoryview(second)], start)
    reader.close()
    return bytes(first + second), any(activity.phase is Phase.COPY for activity in recorder.activities())


@pytest.mark.parametrize(
    ("start", "stop", "is_direct"), [(0, 32, False), (40, 64, True), (20, 44, False), (21, 45, True), (0, 64, False)]
)
def test_a_read_comes_from_where_most_of_it_is(half, start, stop, is_direct):
    got, was_direct = read(half, start * PAGE, (stop - start) * PAGE)
    assert was_direct is is_direct
    content = half.read_bytes()
    assert got == content[start * PAGE : stop * PAGE]


def test_direct_reads_leave_the_cache_as_it_is(half):
    read(half, 40 * PAGE, 20 * PAGE)
    assert cached_bytes(half) == 32 * PAGE


def test_a_file_that_is_gone_from_its_path_is_read_all_the_same(half):
    content = half.read_bytes()
    reader = CacheFirstReader(half)
    half.unlink()
    buffer = bytearray(100)
    reader.read_into([memoryview(buffer)], 5)
    reader.close()
    assert buffer == content[5:105]


def test_nothing_to_fill_is_no_read(half):
    reader = CacheFirstReader(half)
    reader.read_into([], 5)
    reader.close()


def test_no_descriptor_stays_open(half):
    before = open_descriptors()
    with pytest.raises(ReadError):
        CacheFirstReader(half.with_name("gone"))
    reader = CacheFirstReader(half)
    assert len(open_descriptors()) == len(before) + 2
    with pytest.raises(ReadError):
        reader.read_into([memoryview(bytearray(10))], 64 * PAGE)
    reader.close()
    reader.close()
    assert open_descriptors() == before
