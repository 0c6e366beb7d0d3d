"""Streamed weights that stay, and where, by the rules of the runtime (`runtime/streaming/streaming_limits.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from bigload.devices import DISK
from bigload.planning.timing.schedule import BlockSchedule
from bigload.units import MIB

SHARE_FOR_PAGES = 0.8
"""Share of the free memory for pages of files; beyond it they evict other pages, or each other."""

READ_BY_ONE_THREAD_BELOW_BYTES = 16 * MIB
"""Of weights that are copied from files together: more bytes are read by several threads."""


def room_for_pages(free_bytes: int, window_bytes: int) -> int:
    """Return the bytes of `free_bytes` for pages that stay, where up to `window_bytes` of others come and go."""
    return max(min(int(SHARE_FOR_PAGES * free_bytes), free_bytes - window_bytes), 0)


class Source(Enum):
    """Place of a block's weights when it is to run: on its device, in the page cache, or only where they live."""

    DEVICE = "device"
    CACHE = "cache"
    DISK = "disk"


class SteadyState(NamedTuple):
    """Places of all weights in the steady state.

    Attributes:
        sources: Of each block, without its routed experts.
        routed_source: Of routed experts that are not resident.
        missed_share: Share of the chosen experts that are not resident.
        is_in_place: Whether the CPU computes with pages of the files; otherwise weights are copied.
        is_routed_in_place: The same of routed experts.
        is_first: Whether no pass has run: pages of files then take memory that nothing has touched lately.
    """

    sources: tuple[Source, ...]
    routed_source: Source
    missed_share: float
    is_in_place: bool
    is_routed_in_place: bool
    is_first: bool = False

    def before_a_pass(self) -> SteadyState:
        """Return what is found in the first pass: everything is where it lives."""
        sources = (Source.DISK,) * len(self.sources)
        return self._replace(sources=sources, routed_source=Source.DISK, missed_share=1.0, is_first=True)


def steady_state(schedule: BlockSchedule, free_bytes: int | None) -> SteadyState:
    """Return what stays once a pass has run, with `free_bytes` of RAM for pages; `None` is room for all."""
    blocks = schedule.blocks
    on_cpu = schedule.is_in_place
    streamed = schedule.fetched
    separate = any(block.are_separate for block in blocks if block.streams_experts)
    steady_bytes = sum(blocks[index].dense_bytes for index in streamed)
    routed_bytes = sum(block.routed_bytes for block in blocks if block.streams_experts)
    paged = sum(blocks[index].dense_bytes for index in streamed if blocks[index].home == DISK)
    paged += sum(block.routed_bytes for block in blocks if block.streams_experts and block.routed_home == DISK)
    room = None if free_bytes is None else room_for_pages(free_bytes, window_bytes=0)
    pages_fit = room is None or paged <= room
    resident = 0
    if on_cpu and pages_fit:
        resident = paged
    elif on_cpu and routed_bytes and room is not None and steady_bytes < room:
        left = room - steady_bytes
        resident = steady_bytes + (left // 2 if separate else left)  # copies cannot be taken back, as pages can
    sizes = [blocks[index].dense_bytes for index in streamed]
    kept = {streamed[place] for place in places_evenly(sizes, resident)}
    kept_bytes = sum(blocks[index].dense_bytes for index in kept)
    stays = room_for_pages(free_bytes or 0, schedule.window_bytes + max(sizes, default=0))
    cached = set(streamed) if pages_fit else {streamed[place] for place in places_evenly(sizes, stays)}
    sources = (
        Source.DEVICE if index in kept else Source.CACHE if index in cached else Source.DISK
        for index in range(len(blocks))
    )
    return SteadyState(
        sources=tuple(sources),
        routed_source=Source.CACHE if pages_fit else Source.DISK,
        missed_share=1 - min((resident - kept_bytes) / routed_bytes, 1.0) if routed_bytes else 0.0,
        is_in_place=on_cpu,
        is_routed_in_place=on_cpu and not separate,
    )


def places_evenly(sizes: Sequence[int], num_bytes: int) -> Iterator[int]:
    """Yield places of `sizes` that take `num_bytes` at most, evenly among the others.

    Of ten equal sizes and room for four: places 2, 4, 7 and 9.
    """
    total = sum(sizes)
    credit = 0.0
    for place, size in enumerate(sizes):
        credit += size * min(num_bytes / total, 1.0) if total else 0.0
        if size <= credit + 0.5:  # bytes are whole, credit has been rounded many times
            credit -= size
            yield place
