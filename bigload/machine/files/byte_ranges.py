"""Byte ranges as pairs of start and stop."""

from __future__ import annotations

from collections.abc import Iterable


def merged_ranges(ranges: Iterable[tuple[int, int]], *, max_gap: int = 0) -> list[tuple[int, int]]:
    """Return `ranges` in rising order without empty ones, those joined that lie at most `max_gap` bytes apart."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1] + max_gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        elif start < stop:
            merged.append((start, stop))
    return merged
