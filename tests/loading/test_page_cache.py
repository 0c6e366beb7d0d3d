import os
import subprocess

import pytest

from bigload.loading.page_cache import cached_fraction, evict
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


@pytest.mark.parametrize("ask", [evict, cached_fraction])
def test_a_missing_file_is_an_error(tmp_path, ask):
    with pytest.raises(FileNotFoundError):
        ask([tmp_path / "gone"])


def test_no_descriptor_stays_open(disk_file):
    before = open_descriptors()
    evict([disk_file])
    cached_fraction([disk_file])
    assert open_descriptors() == before
