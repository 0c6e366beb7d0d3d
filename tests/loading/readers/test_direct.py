import errno
import mmap
import os
import threading
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigload.errors import ReadError, UnsupportedMethodError
from bigload.loading.readers import direct
from bigload.loading.readers.direct import CacheFirstReader, DirectReader, direct_alignment
from bigload.machine.files.page_cache import cached_bytes, evict
from bigload.machine.memory.huge_pages import address_of, allocate
from bigload.machine.threads.activities import Phase, Recorder
from bigload.machine.threads.inflight_pool import BlockPool
from builders import open_descriptors

UNIT = 64 * 1024
SIZE = 3 * UNIT + 1234  # the end is no multiple of any block


@pytest.fixture(scope="module", autouse=True)
def _small_pieces_in_place():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "_MIN_IN_PLACE_BYTES", UNIT)
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A file that can be read directly, and its bytes."""
    path = tmp_path_factory.mktemp("direct") / "file"
    content = os.urandom(SIZE)
    path.write_bytes(content)
    if direct_alignment(path) is None:
        pytest.skip("the tests' file system offers no direct reads")
    return path, content


def read(path, offset, sizes, *, pool=None, shift=0):
    """Return what a direct reader puts into buffers of `sizes`, and check that nothing beside them is touched."""
    memory = allocate(sum(sizes) + len(sizes) + shift + 1)
    view, start, views = memoryview(memory), shift, []
    for size in sizes:
        views.append(view[start : start + size])
        start += size + 1
    with DirectReader(path, pool=pool) as reader:
        reader.read_into(views, offset)
    got = b"".join(views)
    for buffer in views:
        buffer[:] = bytes(len(buffer))
    assert bytes(view) == bytes(len(view))
    return got


@st.composite
def requests(draw):
    """Any offset, and any split of what follows into buffers, some of them large enough to be read in place."""
    offset = draw(st.one_of(st.integers(0, SIZE), st.sampled_from([0, 512, 4096, UNIT, SIZE - 1234])))
    sizes, left = [], SIZE - offset
    for size in draw(st.lists(st.sampled_from([0, 1, 63, 512, 4096, 5000, UNIT + 700, 2 * UNIT]), max_size=6)):
        sizes.append(min(size, left))
        left -= sizes[-1]
    return offset, sizes


@settings(suppress_health_check=list(HealthCheck))
@given(request=requests(), shift=st.sampled_from([0, 1, 64, 512, 1000]), block=st.sampled_from([4096, UNIT, 8 * UNIT]))
def test_any_bytes_into_any_buffers_are_those_of_the_file(stored, request, shift, block):
    path, content = stored
    offset, sizes = request
    got = read(path, offset, sizes, pool=BlockPool(1, block_bytes=block), shift=shift)
    assert got == content[offset : offset + sum(sizes)]


def test_what_lies_right_is_read_in_place_and_only_its_ends_are_copied(stored):
    path, content = stored
    recorder = Recorder(is_tracing=True)
    memory = allocate(2 * UNIT)
    target = memoryview(memory)[100 : 100 + UNIT + 4096 * 2]
    assert address_of(memory) % mmap.PAGESIZE == 0
    with DirectReader(path, recorder=recorder) as reader:
        reader.read_into([target], 100)
    assert target == content[100 : 100 + len(target)]
    copied = sum(activity.num_bytes for activity in recorder.activities() if activity.phase is Phase.COPY)
    assert 0 < copied < 2 * mmap.PAGESIZE
    assert [activity.phase for activity in recorder.activities()].count(Phase.READ) == 1  # the ends with the rest


def test_reads_and_copies_are_told_apart_and_name_the_file(stored):
    path, _ = stored
    recorder = Recorder(is_tracing=True)
    with DirectReader(path, recorder=recorder) as reader:
        reader.read_into([memoryview(bytearray(1000))], 7)
    assert [(activity.phase, activity.file) for activity in recorder.activities()] == [
        (Phase.READ, "file"),
        (Phase.COPY, "file"),
    ]
    assert recorder.activities()[1].num_bytes == 1000


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("beyond", [1, 512, 4096, 2 * UNIT])
def test_a_file_that_ends_early_says_where_and_how_much_is_missing(stored, monkeypatch, in_place, beyond):
    path, _ = stored
    whole, alignment = os.preadv, direct_alignment(path)

    def strict(descriptor, buffers, offset):  # some file systems look at the offset before they look for the end
        assert offset % alignment == 0
        return whole(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", strict)
    num_bytes = SIZE - UNIT + beyond
    memory = allocate(num_bytes + 64)
    start = 0 if in_place else 64
    with DirectReader(path) as reader, pytest.raises(ReadError) as caught:
        reader.read_into([memoryview(memory)[start : start + num_bytes]], UNIT)
    assert f"ended at byte {SIZE}, {beyond} bytes too early" in str(caught.value)
    assert caught.value.path == path


def test_bytes_past_the_end_are_a_read_error(stored):
    path, _ = stored
    with DirectReader(path) as reader, pytest.raises(ReadError, match="10 bytes too early"):
        reader.read_into([memoryview(bytearray(10))], 10 * SIZE)


def test_a_file_cut_short_while_it_is_open_is_a_read_error(stored, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * UNIT))
    with DirectReader(path) as reader:
        os.truncate(path, UNIT + 5)
        with pytest.raises(ReadError, match=f"ended at byte {UNIT + 5}"):
            reader.read_into([memoryview(bytearray(3 * UNIT))], 0)


@pytest.mark.parametrize("left", [3 * UNIT - 1, 3 * UNIT - mmap.PAGESIZE, UNIT, 0])
def test_a_mapped_file_that_is_cut_short_between_two_views_is_a_read_error(stored, tmp_path, left):
    path = tmp_path / "file"
    path.write_bytes(b"a" * 3 * UNIT)
    with closing(CacheFirstReader(path)) as reader:
        with reader.viewed(UNIT, 3 * UNIT) as view:
            assert bytes(view) == b"a" * 2 * UNIT
        os.truncate(path, left)
        with pytest.raises(ReadError, match="ended"), reader.viewed(UNIT, 3 * UNIT):
            pass


def test_a_file_replaced_while_it_is_open_is_read_as_it_was(stored, tmp_path):
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(b"old" * 1000)
    other.write_bytes(b"new" * 1000)
    buffer = bytearray(300)
    with DirectReader(path) as reader:
        other.rename(path)
        reader.read_into([memoryview(buffer)], 3)
    assert buffer == b"old" * 100


@pytest.mark.parametrize("most", [1, 100, 512, 4096, 70_000])
def test_reads_that_come_back_short_are_continued(stored, monkeypatch, most):
    path, content = stored
    whole = os.preadv
    least = direct_alignment(path)
    most = max(most // least, 1) * least

    def short(descriptor, buffers, offset):
        return whole(descriptor, [memoryview(buffers[0])[:most]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert read(path, 10, [30_000]) == content[10:30_010]


@pytest.mark.parametrize("code", [errno.EIO, errno.EINVAL])
def test_an_error_in_the_middle_names_the_file_and_the_place(stored, monkeypatch, code):
    path, _ = stored
    whole = os.preadv

    def failing(descriptor, buffers, offset):
        if offset >= UNIT:
            raise OSError(code, os.strerror(code))
        return whole(descriptor, buffers, offset)

    reader = DirectReader(path, pool=BlockPool(1, block_bytes=UNIT))
    monkeypatch.setattr(os, "preadv", failing)
    with reader, pytest.raises(ReadError, match=rf"{os.strerror(code)} at byte {UNIT}"):
        reader.read_into([memoryview(bytearray(3 * UNIT))], 5)


def test_many_threads_share_a_reader_and_its_memory(stored):
    path, content = stored
    pool, lent, most = BlockPool(2, block_bytes=8192), [], []
    lend = pool.lend
    failures = []

    def counting():
        context = lend()
        enter, leave = context.__enter__, context.__exit__

        class Counted:
            def __enter__(self):
                block = enter()
                lent.append(id(block))
                most.append(len(lent))
                return block

            def __exit__(self, *error):
                lent.pop()
                return leave(*error)

        return Counted()

    pool.lend = counting
    with DirectReader(path, pool=pool) as reader:

        def work(number):
            for start in range(number * 1000, SIZE - 20_000, 30_000):
                buffer = bytearray(20_000)
                reader.read_into([memoryview(buffer)[:77], memoryview(buffer)[77:]], start)
                if buffer != content[start : start + 20_000]:
                    failures.append(start)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert 1 <= max(most) <= 2


def test_nothing_to_fill_reads_nothing(stored):
    path, _ = stored
    recorder = Recorder(is_tracing=True)
    with DirectReader(path, recorder=recorder) as reader:
        reader.read_into([], 10 * SIZE)
        reader.read_into([memoryview(bytearray())], 10 * SIZE)
    assert recorder.activities() == ()


def test_read_only_memory_is_refused(stored):
    path, _ = stored
    with DirectReader(path) as reader, pytest.raises((TypeError, BufferError)):
        reader.read_into([memoryview(bytes(10))], 0)


def test_what_the_system_says_of_alignment_is_a_power_of_two(stored):
    alignment = direct_alignment(stored[0])
    assert alignment & (alignment - 1) == 0


def test_where_the_system_cannot_say_it_is_tried(stored, monkeypatch):
    path, content = stored
    monkeypatch.setattr(direct, "_told_alignment", lambda path: None)
    assert direct_alignment(path) == mmap.PAGESIZE
    assert read(path, 4001, [10_000]) == content[4001:14_001]


@pytest.mark.parametrize("refuses", ["open", "preadv"])
def test_a_file_system_that_refuses_has_no_alignment_and_is_told(tmp_path, monkeypatch, refuses):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    whole = getattr(os, refuses)

    def refusing(first, second, *rest):
        if refuses == "preadv" or second & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return whole(first, second, *rest)

    monkeypatch.setattr(direct, "_told_alignment", lambda path: None)
    monkeypatch.setattr(os, refuses, refusing)
    before = open_descriptors()
    assert direct_alignment(path) is None
    with pytest.raises(UnsupportedMethodError, match="offers no reads past the page cache") as caught:
        DirectReader(path)
    assert caught.value.path == path
    assert open_descriptors() == before


@pytest.mark.parametrize("told", [0, 2**20])
def test_alignments_that_nobody_can_use_are_none(stored, monkeypatch, told):
    monkeypatch.setattr(direct, "_told_alignment", lambda path: told)
    assert direct_alignment(stored[0]) is None


def test_a_missing_file_is_a_read_error_that_names_it(tmp_path):
    with pytest.raises(ReadError, match="No such file") as caught:
        DirectReader(tmp_path / "gone")
    assert caught.value.path == tmp_path / "gone"


def test_no_descriptor_stays_open_whatever_happens(stored):
    path, _ = stored
    before = open_descriptors()
    reader = DirectReader(path)
    with pytest.raises(ReadError):
        reader.read_into([memoryview(bytearray(10))], SIZE)
    assert len(open_descriptors()) == len(before) + 1
    reader.close()
    reader.close()
    assert open_descriptors() == before


# Cached ranges from the page cache, the rest from the disk


@pytest.fixture
def half(tmp_path):
    """A file of 64 pages of which the first 32 are cached, where the file system has direct reads."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * mmap.PAGESIZE))
    if direct_alignment(path) is None or evict([path]):
        pytest.skip("the tests' file system has no direct reads, or keeps its files in memory")
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(descriptor, 32 * mmap.PAGESIZE, 0)
    os.close(descriptor)
    return path


@pytest.fixture(params=[True, False])
def with_or_without_cachestat(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(direct, "cached_pages", lambda descriptor, start, stop: None)


def read_cache_first(path, start, num_bytes):
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
@pytest.mark.usefixtures("with_or_without_cachestat")
def test_a_read_comes_from_where_most_of_it_is(half, start, stop, is_direct):
    got, was_direct = read_cache_first(half, start * mmap.PAGESIZE, (stop - start) * mmap.PAGESIZE)
    assert was_direct is is_direct
    content = half.read_bytes()
    assert got == content[start * mmap.PAGESIZE : stop * mmap.PAGESIZE]


@pytest.mark.parametrize(("start", "num_waits"), [(0, 0), (40, 1)])
def test_reads_from_the_disk_are_made_as_waits_for_it(half, start, num_waits):
    waits = []

    @contextmanager
    def waiting():
        waits.append(start)
        yield

    with closing(CacheFirstReader(half, waiting=waiting)) as reader:
        reader.read_into([memoryview(bytearray(mmap.PAGESIZE))], start * mmap.PAGESIZE)
    assert len(waits) == num_waits


def test_of_a_long_range_an_eighth_is_looked_up_where_that_takes_long(tmp_path, monkeypatch):
    path, asked = tmp_path / "file", []
    path.write_bytes(bytes(3 << 20))
    if direct_alignment(path) is None:
        pytest.skip("the tests' file system has no direct reads")
    monkeypatch.setattr(direct, "cached_pages", lambda descriptor, start, stop: None)
    monkeypatch.setattr(direct, "cached_bytes", lambda _path, ranges: asked.extend(ranges) or 0)
    read_cache_first(path, 100, (2 << 20) + 10)
    read_cache_first(path, 0, 1 << 19)
    *long, short = asked
    assert short == (0, 1 << 19)
    assert [start for start, _ in long] == list(range(100, 100 + (2 << 20) + 10, 1 << 19))
    assert sum(stop - start for start, stop in long) == 4 * UNIT + 10


def test_direct_reads_leave_the_cache_as_it_is(half):
    read_cache_first(half, 40 * mmap.PAGESIZE, 20 * mmap.PAGESIZE)
    assert cached_bytes(half) == 32 * mmap.PAGESIZE


def test_a_file_that_is_gone_from_its_path_is_read_all_the_same(half):
    content = half.read_bytes()
    reader = CacheFirstReader(half)
    half.unlink()
    buffer = bytearray(100)
    reader.read_into([memoryview(buffer)], 5)
    reader.close()
    assert buffer == content[5:105]


def test_nothing_to_fill_is_no_read_of_either_kind(half):
    reader = CacheFirstReader(half)
    reader.read_into([], 5)
    reader.close()


def test_no_descriptor_of_either_kind_stays_open(half):
    before = open_descriptors()
    with pytest.raises(ReadError):
        CacheFirstReader(half.with_name("gone"))
    reader = CacheFirstReader(half)
    assert len(open_descriptors()) == len(before) + 2
    with pytest.raises(ReadError):
        reader.read_into([memoryview(bytearray(10))], 64 * mmap.PAGESIZE)
    reader.close()
    reader.close()
    assert open_descriptors() == before
