"""Report of a rank on a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigload.loading.settings import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoadReport:
    """One rank's share of a load.

    Attributes:
        rank: Its rank.
        needed_bytes: Bytes of its part in the files.
        read_bytes: Bytes that it asked of the files; none of what rank 0 sent.
        stored_bytes: Bytes of all tensors of the checkpoint.
        seconds: From the first check until the last byte was there.
        method: How files were read that this rank has for itself; never `auto`. `None` if it was sent everything.
        reason: Why this method, as half a sentence.
        threads: Threads that read.
    """

    rank: int
    needed_bytes: int
    read_bytes: int
    stored_bytes: int
    seconds: float
    method: Method | None
    reason: str
    threads: int

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> RankLoadReport:
        """Return a report from what `asdict` returned, after JSON."""
        method = found["method"]
        return cls(**{**found, "method": None if method is None else Method(method)})
