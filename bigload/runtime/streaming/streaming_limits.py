"""Limits on the memory of streaming: as they were asked for, as they are chosen, and the blocks that stay resident.

Blocks run in the same order again and again. An LRU cache would evict exactly what is needed next, so a fixed set
stays, and the others are read each time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from torch import nn

from bigload.machine.memory.ram import available_memory
from bigload.planning.expert_stats import ExpertStats
from bigload.planning.timing.residency import places_evenly, room_for_pages
from bigload.runtime.device_map.module_sizes import convert_file_size_to_int
from bigload.runtime.streaming.fused_experts import num_experts
from bigload.runtime.streaming.streamed_block import StreamedBlock

_BLOCKS_AHEAD = 2
"""The default prefetch window, in blocks of the largest size: one is loading while the next one is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The bounds on memory for streamed weights, in bytes on the device that runs them.

    Attributes:
        prefetch_bytes: Bound of the prefetch window; 0 loads nothing ahead. `None` is twice the largest block.
        resident_bytes: Bound of resident weights: always the same blocks, evenly among the others, so that these can
            be loaded meanwhile. What is left is for the routed experts that are used most.
            `None` is, on the CPU, all pages of files if they fit into the memory that is free, and else as many experts
            as do.
        workspace_bytes: What a plan has reserved for a block that runs and those that come ahead, if there is a plan.
            Without `prefetch_bytes`, all but the largest block is for these.
        experts_on_demand: Whether experts in the parameters of one module are loaded one by one, where that can be.
        expert_stats: How often they were used in a recorded run.
        resident_experts: Numbers of experts that are loaded when the model is dispatched and stay, by their module:
            those of a plan, in addition to what `resident_bytes` bounds.
    """

    prefetch_bytes: int | None = None
    resident_bytes: int | None = None
    workspace_bytes: int | None = None
    experts_on_demand: bool = True
    expert_stats: ExpertStats | None = None
    resident_experts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prefetch: bool,
        prefetch_bytes: int | str | None,
        resident_bytes: int | str | None,
        experts_on_demand: bool | str | os.PathLike[str] = True,
        model: nn.Module | None = None,
    ) -> StreamOptions | None:
        """Return what was asked for `model`, sizes being numbers or text; `None` if nothing is to be streamed.

        Raises:
            ValueError: a text is no size.
        """
        bounds = [size if size is None else convert_file_size_to_int(size) for size in (prefetch_bytes, resident_bytes)]
        if not prefetch:
            return None
        stats = None if isinstance(experts_on_demand, bool) else ExpertStats.read(Path(experts_on_demand))
        if stats is not None and model is not None:
            stats.check(num_experts(model))
        return cls(
            prefetch_bytes=bounds[0],
            resident_bytes=bounds[1],
            experts_on_demand=experts_on_demand is not False,
            expert_stats=stats,
        )


class StreamingLimits(NamedTuple):
    """Memory for streaming, in bytes on the device that runs the blocks.

    Attributes:
        prefetch_bytes: For blocks that are loaded ahead of their forward.
        resident_bytes: For blocks that stay.
        expert_bytes: For routed blocks, the most used of which stay.
        expert_prefetch_bytes: For routed blocks that are loaded while another one of their layer computes.
        uncached: Blocks whose pages are dropped from the page cache after use: those of all would not fit.
    """

    prefetch_bytes: int
    resident_bytes: int
    expert_bytes: int
    expert_prefetch_bytes: int
    uncached: frozenset[StreamedBlock]


def limits_for(blocks: Sequence[StreamedBlock], options: StreamOptions) -> StreamingLimits:
    """Return the limits for `blocks` on this machine, by the memory that is free now.

    Routed blocks that are kept have memory of their own.
    """
    prefetch_bytes, resident_bytes = options.prefetch_bytes, options.resident_bytes
    planned_bytes = sum(block.num_bytes for block in blocks if block.is_routed and block.is_kept)
    blocks = [block for block in blocks if not (block.is_routed and block.is_kept)]
    steady = [block for block in blocks if not block.is_routed]
    routed = [block for block in blocks if block.is_routed]
    largest = max((block.num_bytes for block in steady), default=0)
    largest_expert = max((block.num_bytes for block in routed if block.is_fused), default=0)
    if prefetch_bytes is None:
        together, reserved = largest + largest_expert, options.workspace_bytes
        prefetch_bytes = _BLOCKS_AHEAD * together if reserved is None else max(reserved - together, 0)
    expert_prefetch_bytes = prefetch_bytes * largest_expert // (largest + largest_expert) if largest_expert else 0
    paged_bytes = sum(block.num_page_bytes for block in blocks)
    available = available_memory()
    free_bytes = (available or 0) - planned_bytes
    room = room_for_pages(free_bytes, window_bytes=0)
    pages_fit = available is None or paged_bytes <= room
    if resident_bytes is None:
        steady_bytes = sum(block.num_bytes for block in steady)
        resident_bytes = 0
        if all(block.is_in_place for block in steady):
            if pages_fit:
                resident_bytes = paged_bytes
            elif routed and steady_bytes < room:  # copies cannot be taken back by the system, as pages can
                left = room - steady_bytes
                resident_bytes = steady_bytes + (left if all(block.is_in_place for block in routed) else left // 2)
    beside_window = room_for_pages(free_bytes, prefetch_bytes + largest)
    cached = set(blocks) if pages_fit else set(chosen_evenly(steady, beside_window))
    kept_bytes = sum(block.num_bytes for block in chosen_evenly(steady, resident_bytes))
    return StreamingLimits(
        prefetch_bytes=prefetch_bytes - expert_prefetch_bytes,
        resident_bytes=resident_bytes,
        expert_bytes=resident_bytes - kept_bytes,
        expert_prefetch_bytes=expert_prefetch_bytes,
        uncached=frozenset(set(blocks) - cached),
    )


def chosen_evenly(blocks: Sequence[StreamedBlock], num_bytes: int) -> list[StreamedBlock]:
    """Return blocks of `num_bytes` at most, evenly among the others."""
    return [blocks[place] for place in places_evenly([block.num_bytes for block in blocks], num_bytes)]
