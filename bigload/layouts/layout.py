"""Output layout: a function from a checkpoint to the files to write, and its capabilities as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bigload.checkpoint.model import Checkpoint
from bigload.layouts.options import ReshardOptions
from bigload.layouts.output import OffsetOf, Output, at_block
from bigload.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRequest:
    """Input of a layout.

    Attributes:
        checkpoint: Checkpoint to rewrite.
        plan: Plan to follow, if one was given; never `None` for a layout that `needs_plan`.
        options: Options of the reshard, of which it heeds sizes, dtypes and those in `OutputLayout.own_options`.
        offset_of: Where the data of a file starts. Files whose bytes are unchanged can share blocks with the source
            if their data lies in blocks as it does there; a layout that cuts tensors has no use for it.
    """

    checkpoint: Checkpoint
    plan: Plan | None = None
    options: ReshardOptions = field(default_factory=ReshardOptions)
    offset_of: OffsetOf = at_block


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputLayout:
    """A layout, to be named in `registry.LAYOUTS`.

    Attributes:
        lay_out: Returns the files to write. It moves no byte.
        needs_plan: It cannot be made from a checkpoint alone.
        follows_plan: A plan decides what is written where, so weights are cast only to the dtype that the plan counted.
        part_of_plan: The part of the checkpoint that is written by a plan, in words; empty if it is all of it.
        takes_keep_fp32: Tensors may differ in dtype.
        own_options: Options that are refused by layouts that do not name them here.
        required_options: Options without which it cannot be made, and what is expected of each.
        recorded_options: Own options that the manifest records.
        next_step: How to use the output, from its path, files and plan; `None` if it can be loaded as a checkpoint.
    """

    lay_out: Callable[[LayoutRequest], Output]
    needs_plan: bool = False
    follows_plan: bool = False
    part_of_plan: str = ""
    takes_keep_fp32: bool = True
    own_options: tuple[str, ...] = ()
    required_options: Mapping[str, str] = field(default_factory=dict)
    recorded_options: tuple[str, ...] = ()
    next_step: Callable[[str, Output, Plan | None], str] | None = None
