"""Mean, spread and ratios of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A measured quantity over several runs. `stddev` is the sample's, 0 for a single run."""

    mean: float
    stddev: float
    minimum: float
    maximum: float

    @property
    def relative_spread(self) -> float:
        """Standard deviation as a part of the mean."""
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
