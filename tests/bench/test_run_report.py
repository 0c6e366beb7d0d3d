"""What the figures of a run mean: the bound, and what is compared with what."""

import pytest

from bigload.bench.page_cache_state import CacheState
from bigload.bench.raw_limit import RawKind
from run_reports import GIB, forward, full_run_report, reads, result, run_report, stats_of

PLAIN, OWN = result("plain", 0.1, 0.2, 0.9), result("bigload", 0.3)


def test_the_bound_is_the_longer_of_computing_and_reading():
    assert run_report(PLAIN, OWN, reads=reads(0.1)).bound_seconds == 0.2
    assert run_report(PLAIN, OWN, reads=reads(0.5)).bound_seconds == 0.5


def test_the_best_raw_read_is_the_one_that_counts():
    assert run_report(PLAIN, OWN, reads=reads(8.0, 7.0, 9.0)).read_seconds == 8.0


def test_from_a_warm_cache_only_what_was_brought_in_has_to_be_read():
    assert run_report(PLAIN, OWN, reads=reads(0.6), streamed_bytes=GIB).read_seconds == pytest.approx(0.2)
    assert run_report(PLAIN, OWN, reads=reads(0.6), streamed_bytes=0).bound_seconds == 0.2
    assert run_report(PLAIN, OWN, reads=reads(0.6), streamed_bytes=None).read_seconds == 0


def test_from_a_cold_cache_everything_on_the_disk_has_to_be_read_once():
    cold = {"cache": CacheState.COLD, "cached": (0.0, 0.0), "reads": reads(0.6, kind=RawKind.DISK)}
    assert run_report(PLAIN, OWN, streamed_bytes=30 * GIB, **cold).read_seconds == 0.6


def test_what_does_not_fit_into_memory_leaves_the_bound_to_reading():
    absent = result("plain", problem="needs 4 GiB", is_identical=None)
    report = run_report(absent, OWN, reads=reads(0.6))
    assert (report.compute_seconds, report.bound_seconds) == (None, pytest.approx(0.6))


def test_nothing_on_disk_and_nothing_in_memory_is_no_bound():
    assert run_report(OWN, disk_bytes=0).bound_seconds is None


def test_only_timed_forwards_are_looked_at():
    report = full_run_report(stats=stats_of(forward(9.0), forward(1.0), forward(2.0)), timed_forwards=2)
    assert [each.seconds for each in report.forwards] == [1.0, 2.0]
    assert run_report(OWN).forwards == ()


def test_one_other_answer_is_enough_not_to_be_identical():
    assert run_report(PLAIN, OWN).is_identical
    assert not full_run_report().is_identical


@pytest.mark.parametrize(("cached", "state"), [((0.0, 0.0), "cold"), ((1.0, 1.0), "warm"), ((0.0, 1.0), "mixed")])
def test_the_state_of_the_page_cache_is_the_one_that_was_found(cached, state):
    assert run_report(OWN, cached=cached).cache_state == state


def test_tokens_per_second_are_those_of_the_median():
    assert run_report(PLAIN, OWN, new_tokens=6).tokens_per_second(PLAIN) == pytest.approx(30)
    assert run_report(PLAIN, OWN).tokens_per_second(PLAIN) is None
