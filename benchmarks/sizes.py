"""Size of the checkpoint and number of rounds of each row, so that a run ends in the time it promises.

A full run has to end in 20 minutes and `--quick` in 3 on 2 cores and a disk of 2 GiB/s. A row with many contenders, or
with slow ones, has fewer rounds; a row of memory has one, because memory does not vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bigload.units import GIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Size of the checkpoint of a row, and rounds that count."""

    num_bytes: int
    rounds: int


DEFAULT = Extent(num_bytes=4 * GIB, rounds=5)
QUICK_DEFAULT = Extent(num_bytes=384 * MIB, rounds=2)
FULL: Mapping[str, Extent] = {}
QUICK: Mapping[str, Extent] = {}


def extent_of(row: str, *, is_quick: bool) -> Extent:
    """Return the extent of a row by its name."""
    return QUICK.get(row, QUICK_DEFAULT) if is_quick else FULL.get(row, DEFAULT)
