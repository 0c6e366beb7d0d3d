import os
from itertools import count

import pytest

from bigload.errors import ReadError
from bigload.loading.readers.direct import direct_alignment
from bigload.loading.strategy import throughput_samples as samples
from bigload.loading.strategy.throughput_samples import FileRanges, cached_part, measure_speeds
from bigload.machine.page_cache import cached_bytes, evict
from builders import open_descriptors

UNIT = 16384


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Three files of 64 units, none of them cached, and samples of a unit."""
    monkeypatch.setattr(samples, "_MIN_SAMPLE_BYTES", UNIT)
    monkeypatch.setattr(samples, "_MAX_SAMPLE_BYTES", UNIT)
    found = []
    for name in "abc":
        path = tmp_path / name
        path.write_bytes(os.urandom(64 * UNIT))
        found.append(FileRanges(path=path, ranges=((100, 64 * UNIT),)))
    if direct_alignment(path) is None or evict([file.path for file in found]):
        pytest.skip("the tests' file system has no direct reads, or keeps its files in memory")
    return found


def warm(file, start, stop):
    descriptor = os.open(file.path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
    os.pread(descriptor, stop - start, start)
    os.close(descriptor)


def test_the_part_that_is_cached_is_counted_over_all_files(files):
    assert cached_part(files) == 0.0
    warm(files[1], 0, 64 * UNIT)
    assert cached_part(files) == pytest.approx(1 / 3)
    assert cached_part([files[1]]) == 1.0
    assert cached_part([]) == 0.0


def test_of_much_only_spread_parts_are_asked_for(files, monkeypatch):
    monkeypatch.setattr(samples, "_MAX_PROBED_BYTES", 12 * UNIT)
    monkeypatch.setattr(samples, "_PROBE_BYTES", UNIT)
    asked = []

    def noting(path, ranges):
        asked.extend((path.name, start // UNIT) for start, _ in ranges)
        return 0

    monkeypatch.setattr(samples, "cached_bytes", noting)
    cached_part(files)
    assert asked == [(name, place) for name in "abc" for place in (0, 16, 32, 48)]


def refuse(path, ranges):
    raise OSError("no map")


@pytest.mark.parametrize("ask", [lambda path, ranges: None, refuse])
def test_a_system_that_does_not_say_is_unknown(files, monkeypatch, ask):
    monkeypatch.setattr(samples, "cached_bytes", ask)
    assert cached_part(files) is None


def noted_sources(monkeypatch):
    """Note every sample that is read, as (way, name, start), in order."""
    noted = []

    def noting(way, whole):
        class Noting(whole):
            def read_into(self, buffers, offset):
                noted.append((way, self._path.name, offset))
                super().read_into(buffers, offset)

        return Noting

    monkeypatch.setattr(samples, "PositionalReader", noting("read", samples.PositionalReader))
    monkeypatch.setattr(samples, "DirectReader", noting("direct", samples.DirectReader))
    return noted


def clock_of(*turns):
    """Return a clock by which the turns take so many seconds, one after the other."""
    ticks = [0.0]
    for seconds in turns:
        ticks += [ticks[-1] + 5, ticks[-1] + 5 + seconds]
    moments = iter(ticks[1:])
    return lambda: next(moments)


def test_the_ways_take_turns_on_different_parts_of_all_files(files, monkeypatch):
    noted = noted_sources(monkeypatch)
    measure_speeds(files, threads=1, clock=count().__next__)
    assert [way for way, _, _ in noted] == ["read"] * 4 + ["direct"] * 8 + ["read"] * 4
    places = {(name, start // UNIT) for _, name, start in noted}
    assert len(places) == 16
    for way in ("read", "direct"):
        assert {name for told, name, _ in noted if told == way} == {"a", "b", "c"}


def test_the_rate_is_bytes_by_seconds_of_both_turns(files):
    speeds = measure_speeds(files, threads=1, clock=clock_of(1, 2, 4, 3))
    assert speeds.read == pytest.approx(2 * 4 * UNIT / (1 + 3))
    assert speeds.direct == pytest.approx(2 * 4 * UNIT / (2 + 4))


def test_every_thread_has_a_sample_in_every_turn(files, monkeypatch):
    noted = noted_sources(monkeypatch)
    measure_speeds(files, threads=6, clock=count().__next__)
    assert len(noted) == 4 * 6


def test_direct_samples_leave_nothing_in_the_page_cache(files, monkeypatch):
    noted = noted_sources(monkeypatch)
    measure_speeds(files, threads=1, clock=count().__next__)
    by_name = {file.path.name: file.path for file in files}
    for way, name, start in noted:
        cached = cached_bytes(by_name[name], [(start, start + UNIT)])
        assert (cached == UNIT) is (way == "read")


def test_what_is_cached_is_no_sample(files, monkeypatch):
    warm(files[0], 0, 64 * UNIT)
    noted = noted_sources(monkeypatch)
    assert measure_speeds(files, threads=1, clock=count().__next__) is not None
    assert {name for _, name, _ in noted} == {"b", "c"}


def test_too_little_that_is_not_cached_is_not_measured(files):
    for file in files:
        warm(file, 0, 60 * UNIT)
    assert measure_speeds(files, threads=1, clock=count().__next__) is None


def test_samples_stay_inside_what_is_going_to_be_read(files, monkeypatch):
    ranges = tuple((start * UNIT, start * UNIT + 3 * UNIT // 2) for start in range(0, 60, 2))
    inside = [FileRanges(path=file.path, ranges=ranges) for file in files]
    noted = noted_sources(monkeypatch)
    measure_speeds(inside, threads=1, clock=count().__next__)
    assert len(noted) == 16
    for _, _, offset in noted:
        assert any(start <= offset and offset + UNIT <= stop for start, stop in ranges)


def test_a_failing_sample_is_raised_and_nothing_stays_open(files):
    before = open_descriptors()
    beyond = [FileRanges(path=file.path, ranges=((0, 128 * UNIT),)) for file in files]
    with pytest.raises(ReadError, match="ended at byte"):
        measure_speeds(beyond, threads=3, clock=count().__next__)
    assert open_descriptors() == before
