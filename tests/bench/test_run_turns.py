"""Turns are fair: another order each round, a new model each time, the page cache as it was asked for."""

import weakref

import pytest
import torch
from torch import nn

from bigload.bench.page_cache_state import CacheState
from bigload.bench.run_contenders import Prepared
from bigload.bench.run_turns import WARM_RUNS_PER_TURN, Racer, first_run, take_turns
from bigload.machine.page_cache import cached_fraction


class Clock:
    """Goes on by a second with each look at it."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        self.now += 1
        return self.now


class Model(nn.Module):
    """Notes when it runs."""

    def __init__(self, name, log):
        super().__init__()
        self.name, self.log = name, log

    def forward(self):
        self.log.append(self.name)
        return torch.ones(2)


@pytest.fixture
def log():
    return []


def racer(name, log, files=(), made=None, **changes):
    def make():
        model = Model(name, log)
        if made is not None:
            made.append(weakref.ref(model))
        return model

    return Racer(name=name, prepared=Prepared(make=make, files=tuple(files)), **changes)


def turns(racers, rounds=2, files=(), cache=CacheState.WARM):
    return take_turns(
        racers, lambda model: model(), rounds=rounds, forwards_per_run=2, files=files, cache=cache, clock=Clock()
    )


@pytest.mark.slow
def test_the_order_is_another_one_in_each_round(log):
    turns([racer("a", log), racer("b", log), Racer(name="read", read=lambda: log.append("read"))], rounds=3)
    firsts = [name for at, name in enumerate(log) if not at or log[at - 1] != name]
    assert firsts == ["a", "b", "read", "b", "read", "a", "read", "a", "b"]


def test_a_warm_turn_times_three_runs_after_one_that_is_not_timed(log, tmp_path):
    seen, _ = turns([racer("a", log)], rounds=2)
    assert log == ["a"] * 2 * (1 + WARM_RUNS_PER_TURN)
    assert seen["a"].seconds == [1] * 2 * WARM_RUNS_PER_TURN
    assert seen["a"].median_seconds == 1
    assert seen["a"].timed_forwards == 2 * WARM_RUNS_PER_TURN


def test_a_cold_turn_times_the_first_run_of_a_new_model(log, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 16))
    seen, _ = turns([racer("a", log, [file])], files=[file], cache=CacheState.COLD)
    assert (log, seen["a"].seconds, seen["a"].timed_forwards) == (["a", "a"], [1, 1], 2)


@pytest.mark.slow
def test_what_was_cached_is_looked_at_before_each_run(log, tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(1 << 16))
    found = cached_fraction([file])
    seen, left = turns([racer("a", log, [file]), racer("b", log)], files=[file], cache=CacheState.COLD)
    assert len(seen["a"].cached) == (4 if found is None else 2)
    assert seen["b"].cached == []  # reads no files
    if not left:
        assert set(seen["a"].cached) == {0.0}


def test_what_reads_no_files_is_not_made_slower_by_a_cold_cache(log):
    seen, _ = turns([racer("plain", log)], cache=CacheState.COLD, rounds=1)
    assert len(seen["plain"].seconds) == WARM_RUNS_PER_TURN


@pytest.mark.slow
def test_a_model_is_gone_before_the_next_one_is_made(log):
    made = []

    def make():
        assert [ref for ref in made if ref() is not None] == []
        model = Model("a", log)
        made.append(weakref.ref(model))
        return model

    both = [Racer(name=name, prepared=Prepared(make=make)) for name in "ab"]
    turns(both)
    assert len(made) == 4
    assert [ref for ref in made if ref() is not None] == []


def test_who_may_fail_is_left_out_from_then_on_and_says_why(log):
    def fails():
        log.append("fails")
        raise OSError("no more")

    racers = [Racer(name="bad", prepared=Prepared(make=fails), may_fail=True), racer("good", log)]
    seen, _ = turns(racers)
    assert log.count("fails") == 1
    assert str(seen["bad"].failure) == "no more"
    assert len(seen["good"].seconds) == 2 * WARM_RUNS_PER_TURN


def test_an_error_of_whom_everything_depends_on_ends_the_bench():
    def fails():
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        turns([Racer(name="read", read=fails)])


def test_the_first_run_gives_an_answer_of_its_own(log):
    answer = torch.zeros(3)

    def run(model):
        answer.add_(1)
        return answer

    found = first_run(Prepared(make=lambda: Model("a", log)), run)
    assert found.answer.tolist() == [1, 1, 1]  # the second run, for memory, does not change it
    assert answer.tolist() == [2, 2, 2]


def test_memory_that_the_model_holds_is_told(log):
    class Holding(Model):
        def __init__(self):
            super().__init__("holding", log)
            self.held = torch.ones(32 << 18)  # 32 MiB

    found = first_run(Prepared(make=Holding), lambda model: model())
    assert 30 << 20 <= found.private_bytes <= 64 << 20
