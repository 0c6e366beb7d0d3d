"""Size of the checkpoint and number of rounds of each row, so that a run ends in the time it promises.

A full run has to end in 20 minutes and `--quick` in 3, on 2 cores and a disk of 1 GiB/s. A row of many or slow
contenders has a smaller checkpoint; so has a row that fills fresh memory: a virtual machine that reports free memory to
its host gives back more than 1 GiB while it is being filled (`results/2026-11-25-limits.md`). A row of short runs has
more rounds; a row of memory has one, because memory varies little.
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


DEFAULT = Extent(num_bytes=2 * GIB, rounds=3)
QUICK_DEFAULT = Extent(num_bytes=384 * MIB, rounds=2)
_SMALL, _FRESH = Extent(num_bytes=GIB, rounds=3), Extent(num_bytes=GIB, rounds=7)

FULL: Mapping[str, Extent] = {
    "load-warm-private": _FRESH,
    "load-cold": _SMALL,
    "load-fp32": Extent(num_bytes=512 * MIB, rounds=7),
    "load-parallel-warm": _FRESH,
    "load-parallel-cold": _SMALL,
    "load-memory": Extent(num_bytes=2 * GIB, rounds=1),
    "diff-warm": _SMALL,
    "diff-cold": _SMALL,
    "reshard-layouts": _SMALL,
    "reshard-peers": _SMALL,
    "reshard-cast": _SMALL,
    "reshard-huge": Extent(num_bytes=0, rounds=1),
    "stream-cold-1": _SMALL,
    "stream-warm-128": _SMALL,
    "start-up": Extent(num_bytes=0, rounds=9),
    "stale-plan": Extent(num_bytes=0, rounds=9),
    "hooks": Extent(num_bytes=0, rounds=25),
    **{name: Extent(num_bytes=0, rounds=5) for name in ("inspect-70b", "plan-70b", "plan-405b")},
}
"""Extents of rows that are not `DEFAULT`; 0 bytes where a row makes its own checkpoint, or none."""

QUICK: Mapping[str, Extent] = {"load-cold": Extent(num_bytes=384 * MIB, rounds=1)}
"""Likewise with `--quick`."""


def extent_of(row: str, *, is_quick: bool) -> Extent:
    """Return the extent of a row by its name."""
    return QUICK.get(row, QUICK_DEFAULT) if is_quick else FULL.get(row, DEFAULT)
