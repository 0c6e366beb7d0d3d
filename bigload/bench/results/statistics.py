"""Mean, spread, outliers and ratios of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

_OUTLIER_SCORE = 3.5
_MAD_TO_STDDEV = 0.6745
_MEAN_DEVIATION_TO_STDDEV = 1.253314
_FEWEST_FOR_OUTLIERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A measured quantity over several runs. `stddev` is the sample's, 0 for a single run."""

    mean: float
    stddev: float
    minimum: float
    maximum: float

    @property
    def relative_spread(self) -> float:
        return self.stddev / self.mean if self.mean else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio of two means, and the standard deviation of the ratio of single runs."""

    value: float
    error: float

    @property
    def is_within_noise(self) -> bool:
        """Whether the error reaches 1, so that neither can be called the faster."""
        return abs(self.value - 1) <= self.error


def summarize(values: Sequence[float]) -> Summary:
    """Return mean, spread and extremes of `values`, of which there is at least one."""
    return Summary(
        mean=statistics.fmean(values),
        stddev=statistics.stdev(values) if len(values) > 1 else 0.0,
        minimum=min(values),
        maximum=max(values),
    )


def ratio(slow: Summary, fast: Summary) -> Ratio:
    """Return how many times `slow` is `fast`.

    The deviation is propagated for a quotient of independent values, s = r * sqrt((a/A)^2 + (b/B)^2).
    """
    value = slow.mean / fast.mean if fast.mean else 1.0
    return Ratio(value=value, error=value * sqrt(slow.relative_spread**2 + fast.relative_spread**2))


def outliers(values: Sequence[float]) -> tuple[int, ...]:
    """Return the positions of values that lie too far from the median to be noise.

    By the modified z-score, 0.6745 * (value - median) / MAD, beyond 3.5 (Iglewicz and Hoaglin, How to Detect and Handle
    Outliers, 1993). Where more than half of the values are equal, so that MAD is 0, the mean of the absolute deviations
    takes its place, as they advise. Fewer than three values have no outliers.
    """
    if len(values) < _FEWEST_FOR_OUTLIERS:
        return ()
    middle = statistics.median(values)
    deviations = [abs(value - middle) for value in values]
    unit = statistics.median(deviations) / _MAD_TO_STDDEV or statistics.fmean(deviations) * _MEAN_DEVIATION_TO_STDDEV
    return tuple(index for index, deviation in enumerate(deviations) if unit and deviation / unit > _OUTLIER_SCORE)
