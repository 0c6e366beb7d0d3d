import mmap
import os
import subprocess
import sys

import pytest

from bigload.machine.files import page_cache
from bigload.machine.files.page_cache import cached_bytes, cached_fraction, cached_pages, evict, has_all_cached
from builders import open_descriptors

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def disk_file(tmp_path):
    """A file of 256 pages on a file system that can let go of its pages."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True).stdout
    if kind.strip() in ("tmpfs", "ramfs", "overlayfs"):
        pytest.skip(f"{kind.strip()} keeps its files in memory")
    path = tmp_path / "file"
    path.write_bytes(os.urandom(256 * PAGE))
    return path


def test_a_file_that_was_just_written_is_cached(disk_file):
    assert cached_fraction([disk_file]) == 1.0


def test_an_evicted_file_is_not_cached(disk_file):
    evict([disk_file])
    assert cached_fraction([disk_file]) == 0.0


def test_pages_that_were_read_are_cached_again(disk_file):
    evict([disk_file])
    disk_file.read_bytes()
    assert cached_fraction([disk_file]) == 1.0


def test_the_fraction_counts_pages_of_all_files(disk_file, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(os.urandom(64 * PAGE))
    evict([disk_file])
    assert cached_fraction([disk_file, other]) == pytest.approx(64 / 320)


def test_a_part_of_a_page_counts_as_a_page(disk_file, tmp_path):
    small = tmp_path / "small"
    small.write_bytes(b"x")
    assert cached_fraction([small]) == 1.0


def test_evicting_changes_no_byte(disk_file):
    before = disk_file.read_bytes()
    evict([disk_file])
    assert disk_file.read_bytes() == before


def test_empty_files_and_no_files_have_nothing_cached(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert cached_fraction([tmp_path / "empty"]) == cached_fraction([]) == 0.0


@pytest.mark.parametrize("ask", [evict, cached_fraction, lambda paths: cached_bytes(*paths)])
def test_a_missing_file_is_an_error(tmp_path, ask):
    with pytest.raises(FileNotFoundError):
        ask([tmp_path / "gone"])


def test_no_descriptor_stays_open(disk_file):
    before = open_descriptors()
    evict([disk_file])
    cached_fraction([disk_file])
    assert open_descriptors() == before


def test_evicting_tells_how_much_the_kernel_kept(disk_file):
    assert evict([disk_file]) == 0
    with disk_file.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as used:
        assert len(set(used[::PAGE])) > 1  # touched, so these pages are in use
        assert evict([disk_file]) == disk_file.stat().st_size
    assert evict([disk_file]) == 0


def test_parts_of_a_file_are_counted_to_the_byte(disk_file):
    evict([disk_file])
    descriptor = os.open(disk_file, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(descriptor, 3 * PAGE, 10 * PAGE)
    os.close(descriptor)
    assert cached_bytes(disk_file) == 3 * PAGE
    assert cached_bytes(disk_file, [(0, 10 * PAGE)]) == 0
    assert cached_bytes(disk_file, [(10 * PAGE, 13 * PAGE)]) == 3 * PAGE
    assert cached_bytes(disk_file, [(10 * PAGE + 5, 10 * PAGE + 15)]) == 10
    assert cached_bytes(disk_file, [(9 * PAGE, 11 * PAGE - 1), (12 * PAGE + 1, 200 * PAGE)]) == 2 * PAGE - 2


def test_pages_of_an_open_file_are_counted(disk_file):
    evict([disk_file])
    with disk_file.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(file.fileno(), 3 * PAGE, 10 * PAGE)
        found = [
            cached_pages(file.fileno(), *(PAGE * end for end in ends)) for ends in ((0, 10), (9, 12), (0, 99), (11, 11))
        ]
        if found[0] is None:
            pytest.skip("this kernel has no cachestat(2)")
        assert found == [0, 2, 3, 0]
        assert cached_pages(file.fileno(), 12 * PAGE - 1, 12 * PAGE + 1) == 2
    assert cached_pages(-1, 0, PAGE) is None


def test_a_range_is_cached_when_all_of_its_pages_are(disk_file):
    evict([disk_file])
    with disk_file.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        os.pread(file.fileno(), 3 * PAGE, 10 * PAGE)
        if cached_pages(file.fileno(), 0, PAGE) is None:
            pytest.skip("this kernel has no cachestat(2)")
    assert has_all_cached(disk_file, 10 * PAGE, 13 * PAGE)
    assert not has_all_cached(disk_file, 10 * PAGE, 14 * PAGE)
    assert not has_all_cached(disk_file, 12 * PAGE + 1, 13 * PAGE + 1)
    assert not has_all_cached(disk_file.with_name("gone"), 0, PAGE)


def test_ranges_that_hold_nothing_have_nothing_cached(disk_file):
    size = disk_file.stat().st_size
    assert cached_bytes(disk_file, []) == cached_bytes(disk_file, [(5, 5), (size, size + 5)]) == 0
    assert cached_bytes(disk_file, [(size - 7, size + 100)]) == 7


def test_a_kernel_that_tells_strangers_that_all_is_cached_is_not_believed(disk_file, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: disk_file.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *arguments, **options: False)
    monkeypatch.setattr(page_cache, "_capabilities", lambda: 0)
    assert cached_bytes(disk_file) is None
    assert cached_fraction([disk_file]) is None
    assert evict([disk_file]) is None
    monkeypatch.setattr(page_cache, "_capabilities", lambda: 1 << 3)
    assert evict([disk_file]) == 0


STRANGER = """
import os, sys
from pathlib import Path
from bigload.machine.files.page_cache import cached_bytes
before = cached_bytes(Path("file"))
os.setgid(54321)
os.setuid(54321)
print(before, cached_bytes(Path("file")))
"""


def test_a_stranger_is_told_that_nobody_knows(disk_file):
    if os.geteuid():
        pytest.skip("only root can become a stranger to its own file")
    disk_file.chmod(0o644)
    disk_file.parent.chmod(0o755)
    evict([disk_file])
    command = [sys.executable, "-c", STRANGER]
    told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=disk_file.parent)
    assert told.stdout.split() == ["0", "None"]
