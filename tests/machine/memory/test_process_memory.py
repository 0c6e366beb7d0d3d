import mmap

import pytest

from bigload.machine.memory.process_memory import MemorySampler, ResidentMemory, peak_bytes, reset_peak, resident_memory
from builders import no_thread_left

MIB = 1 << 20


def test_private_memory_and_pages_of_a_file_are_told_apart(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 32 * MIB)
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory, MemorySampler() as private:
        for offset in range(0, 64 * MIB, mmap.PAGESIZE):
            memory[offset] = 1
    mapped = MemorySampler()
    with (tmp_path / "file").open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with mapped:
        for offset in range(0, 32 * MIB, mmap.PAGESIZE):
            assert content[offset]
    content.close()
    assert private.peak.private_bytes >= 60 * MIB
    assert private.peak.file_bytes < 8 * MIB
    assert mapped.peak.file_bytes >= 30 * MIB
    assert mapped.peak.private_bytes < 8 * MIB


def test_what_is_held_at_the_end_is_seen_however_short_it_took():
    sampler = MemorySampler()
    with sampler:
        memory = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"x" * 32 * MIB)
    memory.close()
    assert sampler.peak.private_bytes >= 30 * MIB


def test_no_thread_is_left_behind_also_after_an_error():
    with no_thread_left(), pytest.raises(ZeroDivisionError), MemorySampler():
        raise ZeroDivisionError


def test_kilobytes_of_the_kernel_become_bytes_and_shared_memory_counts_as_pages_of_files(tmp_path):
    lines = ("VmPeak:	 99 kB", "VmHWM:	 1024 kB", "RssAnon:	 2 kB", "RssFile:	 3 kB", "RssShmem:	 4 kB")
    (tmp_path / "status").write_text("\n".join(lines) + "\n")
    assert resident_memory(tmp_path) == ResidentMemory(2048, 7 * 1024)
    assert peak_bytes(tmp_path) == MIB


def test_a_system_that_does_not_tell_gives_nothing(tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nThreads:\t1\n")
    assert resident_memory(tmp_path) == ResidentMemory(0, 0)
    assert peak_bytes(tmp_path) == 0


def test_memory_that_was_held_shows_in_the_peak_until_the_reset():
    reset_peak()
    before = peak_bytes()
    with mmap.mmap(-1, 64 * MIB) as memory:
        memory.write(b"x" * 1 * MIB * 64)
        during = peak_bytes()
    assert during - before >= 64 * MIB
    assert peak_bytes() >= during
    reset_peak()
    assert peak_bytes() < during
