import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bigload.errors import NotEnoughMemoryError, ReadError
from bigload.loading.readers import mapped
from bigload.loading.readers.mapped import MappedFile, populate_pages, release_pages
from bigload.machine.files.page_cache import evict
from bigload.machine.memory.huge_pages import HUGE_PAGE_BYTES, address_of
from bigload.machine.threads.activities import Phase, Recorder
from builders import open_descriptors

PAGE = mmap.PAGESIZE
SIZE = 40 * PAGE + 321


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


class OldKernel:
    """The C library on a kernel that has no MADV_POPULATE_READ, or one whose answer is `code`."""

    def __init__(self, code=errno.EINVAL):
        self.code = code
        self.mmap, self.munmap = mapped._libc.mmap, mapped._libc.munmap

    def madvise(self, *arguments):
        ctypes.set_errno(self.code)
        return -1


@pytest.fixture(params=["this kernel", "old kernel"])
def kernel(request, monkeypatch):
    """Test what holds with and without a kernel that can populate."""
    if request.param == "old kernel":
        monkeypatch.setattr(mapped, "_libc", OldKernel())


def maps_of(path):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def resident_pages(view):
    """Return how many pages of `view` are in this process's page table."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
        table.seek(address_of(view) // PAGE * 8)
        entries = table.read(-(-len(view) // PAGE) * 8)
    return sum(entry >> 63 for entry in memoryview(entries).cast("Q"))


def test_huge_pages_that_a_range_shares_with_others_can_be_left_in_the_page_table(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(5 * HUGE_PAGE_BYTES)
    with MappedFile(path) as mapped_file:
        view = mapped_file.buffer
    first = -address_of(view) % HUGE_PAGE_BYTES  # of the first huge page that lies in the map as a whole
    populate_pages(view, 0, len(view))
    release_pages(view, first + PAGE, first + 3 * HUGE_PAGE_BYTES + PAGE, page_bytes=HUGE_PAGE_BYTES)
    assert resident_pages(view) * PAGE == len(view) - 2 * HUGE_PAGE_BYTES
    release_pages(view, 0, len(view))
    assert resident_pages(view) == 0


def test_a_map_is_the_file(stored):
    with MappedFile(stored) as file:
        assert file.buffer == stored.read_bytes()


def test_what_is_written_stays_in_the_process_and_never_reaches_the_file(stored):
    before = stored.read_bytes()
    with MappedFile(stored) as file, MappedFile(stored) as other:
        file.buffer[5:8] = b"new"
        file.populate(0, SIZE)
        assert file.buffer[5:8] == b"new"
        assert other.buffer == stored.read_bytes() == before


def test_populated_pages_need_no_fault(stored, kernel):
    evict([stored])
    with MappedFile(stored) as file:
        file.populate(10 * PAGE + 1, 20 * PAGE + 1)
        assert resident_pages(file.buffer[10 * PAGE : 21 * PAGE]) == 11
        assert resident_pages(file.buffer) < 41
        file.populate(0, SIZE)
        assert resident_pages(file.buffer) == 41


def test_nothing_or_what_lies_beyond_the_map_is_not_populated(stored, kernel):
    with MappedFile(stored, 2 * PAGE) as file:
        file.populate(5, 5)
        file.populate(10 * PAGE, 20 * PAGE)
        file.populate(0, 20 * PAGE)
        assert len(file.buffer) == 2 * PAGE


@pytest.mark.parametrize(
    ("offset", "sizes"), [(0, [SIZE]), (3, [1, 0, PAGE, 7]), (SIZE - 1, [1]), (PAGE, []), (5 * SIZE, [0])]
)
def test_buffers_are_filled_one_after_the_other_and_no_page_of_the_map_is_touched(stored, offset, sizes):
    buffers = [bytearray(size) for size in sizes]
    with MappedFile(stored) as file:
        file.read_into([memoryview(buffer) for buffer in buffers], offset)
        assert resident_pages(file.buffer) == 0
    assert b"".join(buffers) == stored.read_bytes()[offset : offset + sum(sizes)]


def test_faults_and_reads_are_told_apart_and_name_the_file(stored):
    recorder = Recorder(is_tracing=True)
    with MappedFile(stored, recorder=recorder) as file:
        file.populate(PAGE, 3 * PAGE)
        file.read_into([memoryview(bytearray(99))], 1)
    told = [(activity.phase, activity.num_bytes, activity.file) for activity in recorder.activities()]
    assert told == [(Phase.FAULT, 2 * PAGE, "file"), (Phase.READ, 99, "file")]


def test_an_empty_file_is_an_empty_map(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    with MappedFile(tmp_path / "empty") as file:
        assert len(file.buffer) == 0
        file.populate(0, 0)
        file.read_into([], 0)
        with pytest.raises(ReadError, match="ended at byte 0, 1 bytes too early"):
            file.read_into([memoryview(bytearray(1))], 0)


def test_a_file_shorter_than_it_has_to_be_is_not_mapped(stored):
    before = open_descriptors()
    with pytest.raises(ReadError, match=f"ended at byte {SIZE}, 9 bytes too early") as caught:
        MappedFile(stored, SIZE + 9)
    assert caught.value.path == stored
    assert open_descriptors() == before
    assert maps_of(stored) == []


TRUNCATED = """
import errno, os, sys
from pathlib import Path
import ctypes
from bigload.errors import ReadError
from bigload.loading.readers import mapped

path, page, is_old, is_late = Path(sys.argv[1]), 4096, "old" in sys.argv, "late" in sys.argv
file = mapped.MappedFile(path)
class Kernel:
    def madvise(self, *arguments):
        os.truncate(path, 3 * page)  # between the look at the size and the touch
        if is_old:
            ctypes.set_errno(errno.EINVAL)
            return -1
        return real.madvise(*arguments)
real = mapped._libc
if is_late:
    mapped._libc = Kernel()
else:
    os.truncate(path, 3 * page)
try:
    file.populate(0, 10 * page)
except ReadError as error:
    print(error)
"""


@pytest.mark.parametrize("when", [["before"], ["late"], ["late", "old"]], ids=" ".join)
def test_a_file_cut_short_is_a_read_error_and_the_process_lives(stored, when):
    command = [sys.executable, "-c", TRUNCATED, str(stored), *when]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"ended at byte {3 * PAGE}, {7 * PAGE} bytes too early" in ended.stdout


def test_touching_finds_the_first_page_that_is_not_to_be_had(stored):
    with MappedFile(stored) as file:
        assert mapped._touch(file.buffer) == 0
        os.truncate(stored, 3 * PAGE)
        assert mapped._touch(file.buffer) == mapped._touch(file.buffer[3 * PAGE :]) == errno.EFAULT
        assert mapped._touch(file.buffer[: 3 * PAGE]) == 0


def test_a_file_cut_short_within_a_page_does_not_read_as_zeros(stored, kernel):
    with MappedFile(stored) as file:
        os.truncate(stored, SIZE - 5)
        with pytest.raises(ReadError, match=f"ended at byte {SIZE - 5}, 2 bytes too early"):
            file.populate(SIZE - 100, SIZE - 3)


@pytest.mark.parametrize("code", [errno.EFAULT, errno.EIO])
def test_a_disk_that_does_not_give_the_bytes_is_a_read_error(stored, monkeypatch, code):
    monkeypatch.setattr(mapped, "_libc", OldKernel(code))
    with MappedFile(stored) as file, pytest.raises(ReadError, match="the disk did not give all of bytes 7 to 100"):
        file.populate(7, 100)


def test_no_memory_for_the_page_table_is_an_error(stored, monkeypatch):
    monkeypatch.setattr(mapped, "_libc", OldKernel(errno.ENOMEM))
    with MappedFile(stored) as file, pytest.raises(NotEnoughMemoryError, match="the map of"):
        file.populate(0, 100)


def test_no_address_space_is_an_error(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    try:
        os.truncate(path, 2**43)
    except OSError:
        pytest.skip("this file system has no files of 8 TiB")
    program = f"""
import resource
from pathlib import Path
from bigload.errors import NotEnoughMemoryError
from bigload.loading.readers.mapped import MappedFile, populate_pages, release_pages
resource.setrlimit(resource.RLIMIT_AS, ({2**40}, resource.RLIM_INFINITY))
try:
    MappedFile(Path({str(path)!r}))
except NotEnoughMemoryError as error:
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "does not fit into memory: 8192.00 GiB" in shown


def test_a_file_larger_than_the_memory_can_be_mapped(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 2**42)
    with MappedFile(path) as file:
        assert file.buffer[2**41] == 0


def test_a_folder_is_a_read_error(tmp_path):
    with pytest.raises(ReadError):
        MappedFile(tmp_path)


def test_a_replaced_file_is_still_the_old_one(stored):
    before = stored.read_bytes()
    other = stored.with_name("other")
    other.write_bytes(bytes(SIZE))
    with MappedFile(stored) as file:
        other.rename(stored)
        file.populate(0, SIZE)
        assert file.buffer == before


def test_the_map_lives_as_long_as_a_part_of_it_and_holds_no_descriptor(stored):
    before = open_descriptors()
    file = MappedFile(stored)
    part = file.buffer[100:200]
    file.close()
    assert open_descriptors() == before
    assert part == stored.read_bytes()[100:200]
    assert len(maps_of(stored)) == 1
    del part
    gc.collect()
    assert maps_of(stored) == []


def test_a_tensor_keeps_the_map(stored):
    torch = pytest.importorskip("torch")
    file = MappedFile(stored)
    tensor = torch.frombuffer(file.buffer, dtype=torch.uint8, count=PAGE, offset=64).view(torch.bfloat16)
    file.close()
    gc.collect()
    assert tensor.view(torch.uint8).numpy().tobytes() == stored.read_bytes()[64 : 64 + PAGE]
    tensor += 1
    del tensor, file
    gc.collect()
    assert maps_of(stored) == []


def test_a_closed_file_says_so(stored):
    file = MappedFile(stored)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        _ = file.buffer


def test_many_threads_populate_and_read_one_map(stored, kernel):
    content, wrong = stored.read_bytes(), []
    before = open_descriptors()

    def work(number):
        for start in range(number * 100, SIZE - 5000, 7000):
            buffer = bytearray(5000)
            file.populate(start, start + 10_000)
            file.read_into([memoryview(buffer)], start)
            if buffer != content[start : start + 5000]:
                wrong.append(start)

    with MappedFile(stored) as file:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
    assert open_descriptors() == before
    assert maps_of(stored) == []
