"""Simulation of the pipeline that runs a model: blocks compute in turn while those that follow are fetched.

Each lane does one thing at a time: a disk, the copies inside RAM, a link, a device. A block is requested when the one
that runs leaves room for it in the prefetch window, and computes when it is there and the one before has ended.
Everything is a maximum or a sum of times, so that no faster lane ever makes a run slower.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Step(NamedTuple):
    """Something that a lane does: `disk`, `ram`, `link` or the name of a device. Times are from the token's start."""

    lane: str
    name: str
    start_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One run of a block.

    Attributes:
        seconds: Of computing what every token needs.
        routed_seconds: Of computing with the experts that it has chosen, one after the other.
        last_routed_seconds: Of those, the ones of the expert that is computed last.
        fetch: Seconds on each lane that brings its weights; the lanes work on them at the same time.
        fetch_bytes: What they take of the prefetch window.
        routed_fetch: The same for chosen experts, which are requested when the rest of the block has run. All but the
            last one compute while others come.
    """

    name: str
    device: str
    seconds: float
    routed_seconds: float = 0.0
    last_routed_seconds: float = 0.0
    fetch: tuple[tuple[str, float], ...] = ()
    fetch_bytes: int = 0
    routed_fetch: tuple[tuple[str, float], ...] = ()


def simulate(works: Sequence[Work], window_bytes: int) -> Iterator[tuple[float, list[Step]]]:
    """Yield when each of `works` ends, and the steps that were decided on when it began."""
    requests = _requests(works, window_bytes)
    free: dict[str, float] = {}
    arrived: dict[int, float] = {}
    now, asked = 0.0, 0

    def bring(name: str, lanes: tuple[tuple[str, float], ...], asked_at: float, steps: list[Step]) -> float:
        start = max((free.get(lane, 0.0) for lane, _ in lanes), default=0.0)
        start = max(start, asked_at)
        for lane, seconds in lanes:
            steps.append(Step(lane, name, start, seconds))
            free[lane] = start + seconds
        return start + max((seconds for _, seconds in lanes), default=0.0)

    for number, work in enumerate(works):
        steps: list[Step] = []
        while asked < len(requests) and requests[asked][0] <= number:
            wanted = requests[asked][1]
            arrived[wanted] = bring(works[wanted].name, works[wanted].fetch, now, steps)
            asked += 1
        begin = max(now, arrived.pop(number, 0.0))
        steps.append(Step(work.device, work.name, begin, work.seconds))
        now = begin + work.seconds
        if work.routed_fetch or work.routed_seconds:
            come = bring(work.name, work.routed_fetch, now, steps)
            begin = max(now, come + work.last_routed_seconds - work.routed_seconds)
            steps.append(Step(work.device, work.name, begin, work.routed_seconds))
            now = begin + work.routed_seconds
        yield now, steps


def _requests(works: Sequence[Work], window_bytes: int) -> list[tuple[int, int]]:
    """Return for each work that is fetched, in order, at the beginning of which work it is requested."""
    found: list[tuple[int, int]] = []
    first, waiting = 0, 0  # when work `first` begins, so many bytes of those after it wait
    for number, work in enumerate(works):
        if not work.fetch:
            continue
        waiting += work.fetch_bytes if number else 0
        while first < number and waiting > window_bytes:
            first += 1
            waiting -= works[first].fetch_bytes if works[first].fetch else 0
        found.append((first, number))
    return found
