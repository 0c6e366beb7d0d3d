"""Options of streaming: bounds on the memory of streamed weights."""

from __future__ import annotations

from dataclasses import dataclass

from bigload.runtime.device_map.module_sizes import convert_file_size_to_int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The bounds on memory for streamed weights, in bytes on the device that runs them.

    Attributes:
        prefetch_bytes: Bound of the prefetch window; 0 loads nothing ahead. `None` is twice the largest block.
        resident_bytes: Bound of resident weights: always the same blocks, evenly among the others, so that these can
            be loaded meanwhile. What is left is for the routed experts that are used most.
            `None` is, on the CPU, all pages of files if they fit into the memory that is free, and else nothing.
        workspace_bytes: What a plan has reserved for a block that runs and those that come ahead, if there is a plan.
            Without `prefetch_bytes`, all but the largest block is for these.
    """

    prefetch_bytes: int | None = None
    resident_bytes: int | None = None
    workspace_bytes: int | None = None

    @classmethod
    def of(
        cls, prefetch: bool, prefetch_bytes: int | str | None, resident_bytes: int | str | None
    ) -> StreamOptions | None:
        """Return what was asked for, sizes being numbers or text; `None` if nothing is to be streamed.

        Raises:
            ValueError: a text is no size.
        """
        bounds = [size if size is None else convert_file_size_to_int(size) for size in (prefetch_bytes, resident_bytes)]
        return cls(prefetch_bytes=bounds[0], resident_bytes=bounds[1]) if prefetch else None
