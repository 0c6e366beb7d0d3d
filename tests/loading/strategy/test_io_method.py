import os
from pathlib import Path

import pytest

from bigload.errors import UnsupportedMethodError
from bigload.loading.readers.direct import direct_alignment
from bigload.loading.settings import Method
from bigload.loading.strategy import io_method
from bigload.loading.strategy.io_method import (
    MIN_DIRECT_BYTES,
    MIN_DIRECT_PART_BYTES,
    FileFacts,
    FileRanges,
    MethodChoice,
    cached_part,
    choose_method,
    decide,
)
from bigload.machine.files.file_systems import FileSystem
from bigload.machine.files.page_cache import evict

LARGE = MIN_DIRECT_BYTES
SHARD = Path("a.safetensors")
UNIT = 16384


def facts(**known):
    return FileFacts(
        **{"num_bytes": LARGE, "least_direct_bytes": LARGE, "file_system": "ext4 on vda", "cached": 0.0, **known}
    )


@pytest.mark.parametrize("asked", [Method.READ, Method.MMAP, Method.DIRECT])
def test_what_is_asked_for_is_done(asked):
    choice = decide(facts(), asked)
    assert (choice.method, choice.reason) == (asked, "asked for")
    assert choice.waits_for_disk is (asked is Method.DIRECT)


def test_direct_reads_that_cannot_be_are_an_error_that_says_where():
    with pytest.raises(UnsupportedMethodError, match="tmpfs offers no reads past the page cache") as caught:
        decide(facts(without_direct=SHARD, file_system="tmpfs"), Method.DIRECT)
    assert caught.value.path == SHARD


@pytest.mark.parametrize("asked", [Method.READ, Method.MMAP])
def test_other_methods_need_no_direct_reads(asked):
    assert decide(facts(without_direct=SHARD), asked).method is asked


def test_a_map_over_a_network_is_made_and_warned_of():
    choice = decide(facts(is_network=True, file_system="nfs4 on server:/x"), Method.MMAP)
    assert choice.method is Method.MMAP
    assert choice.reason.startswith("asked for, though nfs4 on server:/x")


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"num_bytes": LARGE - 1}, "less than 256.00 MiB are read"),
        ({"without_direct": SHARD, "file_system": "tmpfs"}, "tmpfs offers no direct reads"),
        ({"cached": 1.0}, "100 % of the bytes are in the page cache"),
        ({"cached": 0.9}, "90 % of the bytes are in the page cache"),
        ({"cached": None}, "the kernel does not report what is in the page cache"),
    ],
)
def test_small_cached_and_unknown_files_are_read_through_the_page_cache(known, reason):
    assert decide(facts(**known), Method.AUTO) == MethodChoice(method=Method.READ, reason=reason)


def test_a_network_file_system_is_read_through_its_read_ahead_by_more_threads_than_cores():
    choice = decide(facts(is_network=True, file_system="nfs4 on server:/x", cached=0.1), Method.AUTO)
    assert choice == MethodChoice(
        method=Method.READ,
        reason="10 % of the bytes are in the page cache, and nfs4 on server:/x reads ahead for it",
        waits_for_disk=True,
    )


@pytest.mark.parametrize(("cached", "cache_first"), [(0.0, False), (0.01, False), (0.02, True), (0.89, True)])
def test_what_is_not_cached_is_read_directly_and_what_is_cached_is_not_fetched_from_the_disk(cached, cache_first):
    choice = decide(facts(cached=cached), Method.AUTO)
    assert (choice.method, choice.cache_first, choice.waits_for_disk) == (Method.DIRECT, cache_first, True)


def test_the_reason_tells_what_was_found():
    assert decide(facts(cached=0.03), Method.AUTO).reason == (
        "3 % of the bytes are in the page cache; the rest is read directly from ext4 on vda"
    )


@pytest.fixture
def machine(monkeypatch):
    """A machine of made-up facts, and a list of what it was asked for."""
    asked = []
    answers = {"alignment": 512, "cached": 0.0}

    def answer(name):
        def ask(*arguments, **options):
            asked.append(name)
            return answers[name]

        return ask

    monkeypatch.setattr(io_method, "direct_alignment", answer("alignment"))
    monkeypatch.setattr(io_method, "cached_part", answer("cached"))
    monkeypatch.setattr(io_method, "file_system_of", lambda path: FileSystem(kind="ext4", device="vda"))
    answers["asked"] = asked
    return answers


def choose(num_bytes=LARGE, **options):
    return choose_method([FileRanges(path=SHARD, ranges=((0, num_bytes),))], **options)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, ["alignment", "cached"]),
        ({"num_bytes": LARGE - 1}, []),
        ({"asked": Method.READ}, []),
        ({"asked": Method.MMAP}, []),
        ({"asked": Method.DIRECT}, ["alignment"]),
    ],
)
def test_nothing_is_asked_that_does_not_matter(machine, options, asked):
    choose(**options)
    assert machine["asked"] == asked


@pytest.mark.parametrize(
    ("num_bytes", "is_direct"), [(MIN_DIRECT_PART_BYTES, True), (MIN_DIRECT_PART_BYTES - 1, False)]
)
def test_a_part_of_large_files_is_read_directly_and_leaves_the_page_cache_to_the_rest(
    machine, tmp_path, num_bytes, is_direct
):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(LARGE)
    choice = choose_method([FileRanges(path=path, ranges=((0, num_bytes),))])
    assert (choice.method is Method.DIRECT) == is_direct


def test_without_direct_reads_nobody_asks_what_is_cached(machine):
    machine["alignment"] = None
    assert choose() == MethodChoice(method=Method.READ, reason="ext4 on vda offers no direct reads")
    assert machine["asked"] == ["alignment"]


def test_no_files_are_read_without_asking(machine):
    assert choose_method([]).method is Method.READ


@pytest.fixture
def files(tmp_path):
    """Three files of 64 units, none of them cached."""
    found = []
    for name in "abc":
        path = tmp_path / name
        path.write_bytes(os.urandom(64 * UNIT))
        found.append(FileRanges(path=path, ranges=((100, 64 * UNIT),)))
    if direct_alignment(path) is None or evict([file.path for file in found]):
        pytest.skip("the tests' file system has no direct reads, or keeps its files in memory")
    return found


def warm(file):
    descriptor = os.open(file.path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(descriptor, 64 * UNIT, 0)
    os.close(descriptor)


def test_the_part_that_is_cached_is_counted_over_all_files(files):
    assert cached_part(files) == 0.0
    warm(files[1])
    assert cached_part(files) == pytest.approx(1 / 3)
    assert cached_part([files[1]]) == 1.0
    assert cached_part([]) == 0.0


def test_files_of_another_user_are_probed(files, monkeypatch):
    monkeypatch.setattr(io_method, "cached_bytes", lambda path, ranges: None)

    def probed():
        evict([file.path for file in files])
        warm(files[1])
        return cached_part(files)

    # A probe has the kernel read the page that it asks for, and a quick disk may answer before the probe is over.
    found = [probed() for _ in range(5)]
    assert min(found) == pytest.approx(1 / 3)


def test_of_much_only_spread_parts_are_asked_for(files, monkeypatch):
    monkeypatch.setattr(io_method, "_MAX_PROBED_BYTES", 12 * UNIT)
    monkeypatch.setattr(io_method, "_PROBE_BYTES", UNIT)
    asked = []

    def noting(path, ranges):
        asked.extend((path.name, start // UNIT) for start, _ in ranges)
        return 0

    monkeypatch.setattr(io_method, "cached_bytes", noting)
    cached_part(files)
    assert asked == [(name, place) for name in "abc" for place in (0, 16, 32, 48)]


def refuse(path, ranges):
    raise OSError("no map")


def test_a_system_that_does_not_say_is_unknown(files, monkeypatch):
    monkeypatch.setattr(io_method, "cached_bytes", lambda path, ranges: None)
    monkeypatch.setattr(io_method, "probe_cached", lambda path, ranges: None)
    assert cached_part(files) is None


def test_a_file_that_cannot_be_mapped_is_unknown(files, monkeypatch):
    monkeypatch.setattr(io_method, "cached_bytes", refuse)
    assert cached_part(files) is None
