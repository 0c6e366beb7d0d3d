import ctypes
import errno
import mmap
import subprocess
import sys

import pytest

from bigload.errors import NotEnoughMemoryError
from bigload.machine.memory import huge_pages
from bigload.machine.memory.huge_pages import HUGE_PAGE_BYTES, address_of, allocate, prefault, use_huge_pages

MIB = 2**20


@pytest.mark.parametrize("num_bytes", [1, 4096, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 5 * MIB])
def test_memory_is_writable_zeroed_and_large_enough(num_bytes):
    buffer = allocate(num_bytes)
    assert len(buffer) >= num_bytes
    assert not any(buffer[:num_bytes])
    buffer[num_bytes - 1] = 7
    assert buffer[num_bytes - 1] == 7


def test_no_bytes_need_no_memory():
    assert len(allocate(0)) == 0


def test_large_memory_is_whole_huge_pages_long_and_small_memory_is_not():
    assert len(allocate(HUGE_PAGE_BYTES + 1)) == 2 * HUGE_PAGE_BYTES
    assert len(allocate(HUGE_PAGE_BYTES - 1)) == HUGE_PAGE_BYTES - 1


@pytest.mark.parametrize("num_bytes", [2**50, 2**70])
def test_more_than_there_is_is_an_error_that_says_so(num_bytes):
    with pytest.raises(NotEnoughMemoryError, match="does not fit into memory") as caught:
        allocate(num_bytes)
    assert caught.value.needed_bytes >= num_bytes


def test_a_limit_of_address_space_is_an_error_with_a_hint():
    program = f"""
import resource
from bigload.errors import NotEnoughMemoryError
from bigload.machine.memory.huge_pages import allocate
resource.setrlimit(resource.RLIMIT_AS, ({512 * MIB}, resource.RLIM_INFINITY))
try:
    allocate({1024 * MIB})
except NotEnoughMemoryError as error:
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "ulimit -v" in shown


def test_a_system_without_huge_pages_gives_ordinary_ones(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(errno.EINVAL, "no huge pages")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    buffer = allocate(3 * MIB)
    buffer[-1] = 1
    assert buffer[-1] == 1


def resident(buffer):
    """Return how many bytes of `buffer` have memory behind them."""
    pages = ctypes.create_string_buffer(len(buffer) // mmap.PAGESIZE)
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(address_of(buffer)), ctypes.c_size_t(len(buffer)), pages)
    return sum(byte & 1 for byte in pages.raw) * mmap.PAGESIZE


def test_prefaulting_makes_memory_ready_and_changes_no_byte():
    buffer = allocate(8 * MIB)
    buffer[4 * MIB] = 9
    before = resident(buffer)
    if not prefault(buffer, 2 * MIB + 5, 6 * MIB):
        pytest.skip("this kernel cannot (before 5.14)")
    assert before <= 2 * MIB
    assert 4 * MIB <= resident(buffer) <= 4 * MIB + HUGE_PAGE_BYTES
    assert buffer[4 * MIB] == 9
    assert not any(buffer[: 4 * MIB])


def test_nothing_to_prefault_is_no_work():
    assert prefault(bytearray(), 0, 0)
    assert prefault(allocate(10), 5, 5)


class FakeLibc:
    def __init__(self, code):
        self.code = code

    def madvise(self, *arguments):
        ctypes.set_errno(self.code)
        return -1


def test_a_kernel_that_cannot_prefault_is_no_error(monkeypatch):
    monkeypatch.setattr(huge_pages, "_libc", FakeLibc(errno.EINVAL))
    assert not prefault(allocate(4096), 0, 4096)


def test_no_memory_to_prefault_is_an_error(monkeypatch):
    monkeypatch.setattr(huge_pages, "_libc", FakeLibc(errno.ENOMEM))
    with pytest.raises(NotEnoughMemoryError):
        prefault(allocate(4096), 0, 4096)


def whole_huge_pages(buffer):
    """Return the addresses between the first and the last border of a huge page in `buffer`."""
    first = -(-address_of(buffer) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return first, (address_of(buffer) + len(buffer)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


class RecordingLibc:
    """The system's calls, of which advice is recorded."""

    def __init__(self):
        self.advised = []
        self.mincore = huge_pages._libc.mincore

    def madvise(self, address, length, advice):
        self.advised.append((address, address + length, advice))
        return 0


@pytest.fixture
def advised(monkeypatch, tmp_path):
    enabled = tmp_path / "enabled"
    enabled.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "_ENABLED", enabled)
    libc = RecordingLibc()
    monkeypatch.setattr(huge_pages, "_libc", libc)
    return libc.advised


def test_pages_that_an_allocator_has_touched_become_huge_pages_with_their_contents():
    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start, stop = whole_huge_pages(memory)
    headers = range(start - address_of(memory) + 16, stop - address_of(memory), HUGE_PAGE_BYTES)
    for header in headers:
        memory[header] = 7
    use_huge_pages([(address_of(memory), address_of(memory) + len(memory))])
    assert [memory[header] for header in headers] == [7] * len(headers)
    assert not any(memory[: headers[0]])
    if resident(memory) < stop - start:
        pytest.skip("this system collapses no pages (Linux before 6.1, or no huge pages)")


def test_parts_of_one_allocation_after_the_other_share_huge_pages(advised):
    memory = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    begin, (start, stop) = address_of(memory), whole_huge_pages(memory)
    steps = range(0, 16 * MIB, MIB)
    use_huge_pages([(begin + step + 64, begin + step + MIB) for step in reversed(steps)])
    first = start if start > begin else start + HUGE_PAGE_BYTES  # 64 bytes of the first are not among them
    assert advised[0] == (first, stop, mmap.MADV_HUGEPAGE)
    assert {advice for _, _, advice in advised[1:]} == {huge_pages._MADV_COLLAPSE}


def test_memory_that_is_there_is_not_collapsed(advised):
    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = b"x" * len(memory)
    use_huge_pages([(address_of(memory), address_of(memory) + len(memory))])
    assert {advice for _, _, advice in advised} == {mmap.MADV_HUGEPAGE}


def test_maps_of_files_and_shared_memory_stay_as_they_are(advised, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    with path.open("r+b") as file:
        private = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    shared = mmap.mmap(-1, 8 * MIB)
    use_huge_pages([(address_of(each), address_of(each) + len(each)) for each in (private, shared)])
    assert advised == []


def test_no_huge_pages_where_the_system_is_told_never(advised):
    huge_pages._ENABLED.write_text("always madvise [never]\n")
    memory = mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    use_huge_pages([(address_of(memory), address_of(memory) + len(memory))])
    assert advised == []


def test_no_ranges_are_no_work(advised):
    use_huge_pages([])
    assert advised == []
