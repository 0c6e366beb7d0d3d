"""What each rank did for a load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bigload.loading.methods import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoadReport:
    """What one rank did for a load.

    Attributes:
        rank: Which.
        needed_bytes: Bytes that its part has in the files.
        read_bytes: Bytes that it asked of the files; of what it was sent, none.
        stored_bytes: Bytes of all tensors of the checkpoint.
        seconds: From the first check until the last byte was there.
        method: How files were read that this rank has for itself; never `auto`. `None` if it was sent everything.
        reason: Why so, as half a sentence.
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
        """Return what `asdict` said of a report, after JSON."""
        method = found["method"]
        return cls(**{**found, "method": None if method is None else Method(method)})
