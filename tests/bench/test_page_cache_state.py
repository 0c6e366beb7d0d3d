import mmap
import os

import pytest

from bigload.bench import page_cache_state
from bigload.bench.page_cache_state import CacheState, evict_verified, prepare, warm
from bigload.machine.files.page_cache import cached_bytes

SIZE = 1 << 20


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * SIZE)
    with path.open("rb") as written:
        os.fsync(written.fileno())
    return path


def test_an_eviction_leaves_nothing_and_says_so(file):
    warm([file])
    assert cached_bytes(file) == SIZE
    assert evict_verified([file]) == ()
    assert cached_bytes(file) == 0


def test_what_a_map_holds_stays_and_the_reason_names_who_maps_it(file):
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:: mmap.PAGESIZE]
        (left,) = evict_verified([file])
        assert left.file == file.name
        assert 0 < left.num_bytes <= SIZE
        assert left.reason == "mapped by this process itself"
    assert evict_verified([file]) == ()


def test_a_kernel_that_does_not_say_is_not_taken_for_one_that_evicted(file, monkeypatch):
    monkeypatch.setattr(page_cache_state, "cached_bytes", lambda path: None)
    (left,) = evict_verified([file])
    assert left.num_bytes is None
    assert "own a file" in left.reason


def test_warm_brings_back_what_was_dropped(file):
    evict_verified([file])
    assert prepare([file], CacheState.WARM) == ()
    assert cached_bytes(file) == SIZE


def test_as_it_is_changes_nothing(file):
    evict_verified([file])
    assert prepare([file], CacheState.AS_IS) == ()
    assert cached_bytes(file) == 0
