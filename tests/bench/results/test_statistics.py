from math import sqrt

import pytest

from bigload.bench.results.statistics import Ratio, Summary, outliers, ratio, summarize


def summary(mean, stddev):
    return Summary(mean=mean, stddev=stddev, minimum=mean, maximum=mean)


def test_mean_spread_and_extremes_of_five_runs():
    # Deviations from 5 are -3, -1, -1, 1, 4: their squares add up to 28, over 5 - 1.
    found = summarize([2.0, 4.0, 4.0, 6.0, 9.0])
    assert found.mean == 5.0
    assert found.stddev == pytest.approx(sqrt(7))
    assert (found.minimum, found.maximum) == (2.0, 9.0)
    assert found.relative_spread == pytest.approx(sqrt(7) / 5)


def test_a_single_run_has_no_spread():
    assert summarize([3.5]) == Summary(mean=3.5, stddev=0.0, minimum=3.5, maximum=3.5)


def test_equal_runs_have_no_spread():
    assert summarize([2.0, 2.0, 2.0]).stddev == 0.0


def test_a_mean_of_nothing_has_no_relative_spread():
    assert summarize([0.0, 0.0]).relative_spread == 0.0


def test_the_error_of_a_ratio_joins_both_relative_spreads():
    # 6 / 2 = 3; relative spreads 0.3 and 0.4 join to 0.5.
    found = ratio(summary(6.0, 1.8), summary(2.0, 0.8))
    assert found.value == pytest.approx(3.0)
    assert found.error == pytest.approx(1.5)


def test_a_ratio_to_itself_is_one():
    assert ratio(summary(4.0, 0.0), summary(4.0, 0.0)) == Ratio(value=1.0, error=0.0)


def test_a_ratio_to_nothing_is_one():
    assert ratio(summary(4.0, 0.0), summary(0.0, 0.0)).value == 1.0


@pytest.mark.parametrize(
    ("value", "error", "is_within"), [(1.2, 0.2, True), (1.25, 0.125, False), (1.0, 0.0, True), (0.5, 0.5, True)]
)
def test_an_error_that_reaches_one_is_noise(value, error, is_within):
    assert Ratio(value=value, error=error + 1e-12).is_within_noise is is_within


def test_one_value_far_from_the_others_is_an_outlier():
    # Median 10, deviations 1, 0, 0, 1, 20 with a median of 1: the score of the last is 0.6745 * 20.
    assert outliers([9.0, 10.0, 10.0, 11.0, 30.0]) == (4,)


def test_values_in_a_wide_cloud_are_no_outliers():
    assert outliers([1.0, 2.0, 3.0, 4.0, 5.0]) == ()


def test_where_most_values_are_equal_the_mean_deviation_judges():
    # Median deviation 0; mean deviation 0.9, times 1.253314: the score of the last is 9 / 1.128.
    assert outliers([1.0] * 9 + [10.0]) == (9,)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 100.0], [2.0, 2.0, 2.0]])
def test_too_few_and_equal_values_have_no_outliers(values):
    assert outliers(values) == ()
