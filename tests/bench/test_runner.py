import mmap

import pytest

from bigload.bench import runner
from bigload.bench.page_cache_state import CacheState, LeftInCache
from bigload.bench.runner import Contender, run_rounds
from builders import no_thread_left


class Clock:
    """Every run takes the next of `seconds`: two looks at the clock are one run."""

    def __init__(self, *seconds):
        self._seconds = iter(seconds)
        self._now = 100.0
        self._runs = False

    def __call__(self):
        if self._runs:
            self._now += next(self._seconds)
        self._runs = not self._runs
        return self._now


@pytest.fixture
def files(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    return [tmp_path / "file"]


def contenders(*names, run=lambda: None):
    return [Contender(name=name, run=run) for name in names]


def test_the_order_is_another_one_in_each_round(files):
    words = []
    run_rounds(contenders("a", "b", "c"), runs=4, files=files, on_run=words.append)
    assert words == [
        f"{name}: run {number} of 4" for number, order in enumerate(("abc", "bac", "cab", "acb"), 1) for name in order
    ]


def test_the_clock_decides_what_is_reported(files):
    # Round 1 runs a, b; round 2 begins with the other.
    measured = run_rounds(contenders("a", "b"), runs=2, files=files, clock=Clock(4.0, 1.0, 3.0, 6.0)).measured
    assert measured["a"].seconds == (4.0, 6.0)
    assert measured["b"].seconds == (1.0, 3.0)


def test_what_a_run_returns_is_let_go_before_the_next_one(files):
    class Memory:
        alive = 0

        def __init__(self):
            assert Memory.alive == 0
            Memory.alive += 1

        def __del__(self):
            Memory.alive -= 1

    run_rounds(contenders("a", "b", run=Memory), runs=2, files=files)
    assert Memory.alive == 0


def test_one_that_may_fail_is_left_out_from_its_first_error_on(files):
    calls = []

    def fail():
        calls.append(1)
        raise OSError("no such luck")

    weak = Contender(name="weak", run=fail, may_fail=True)
    outcome = run_rounds([weak, *contenders("a")], runs=3, files=files)
    assert len(calls) == 1
    assert str(outcome.failures["weak"]) == "no such luck"
    assert list(outcome.measured) == ["a"]
    assert len(outcome.measured["a"].seconds) == 3


def test_the_error_of_another_ends_the_bench_and_leaves_no_thread(files):
    with no_thread_left(), pytest.raises(ZeroDivisionError):
        run_rounds(contenders("a", run=lambda: 1 / 0), runs=3, files=files)


def test_the_cache_is_prepared_before_every_run_and_the_worst_that_stayed_is_kept(files, monkeypatch):
    sizes = iter([5, 9, 7])
    asked = []

    def prepare(paths, state):
        asked.append((paths, state))
        return (LeftInCache(file="file", num_bytes=next(sizes), reason="mapped"),)

    monkeypatch.setattr(runner, "prepare", prepare)
    outcome = run_rounds(contenders("a"), runs=3, files=files, cache=CacheState.COLD)
    assert asked == [(files, CacheState.COLD)] * 3
    assert [left.num_bytes for left in outcome.left_in_cache] == [9]


def test_the_part_in_the_cache_is_measured_at_every_start(files, monkeypatch):
    parts = iter([0.25, 1.0, 0.5])
    monkeypatch.setattr(runner, "cached_fraction", lambda paths: next(parts))
    assert run_rounds(contenders("a"), runs=3, files=files).measured["a"].cached == (0.25, 1.0)


def test_a_part_that_the_kernel_does_not_tell_may_be_anything(files, monkeypatch):
    monkeypatch.setattr(runner, "cached_fraction", lambda paths: None)
    assert run_rounds(contenders("a"), runs=1, files=files).measured["a"].cached == (0.0, 1.0)


def test_the_memory_of_a_run_shows(files):
    size = 32 * 2**20

    def touch_fresh_memory():  # a map, because the heap may reuse what an earlier test freed
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
        return memory

    measured = run_rounds(contenders("a", run=touch_fresh_memory), runs=1, files=files).measured["a"]
    assert size * 0.95 <= measured.peak_private_bytes < 2 * size
    assert measured.peak_bytes > measured.peak_private_bytes
