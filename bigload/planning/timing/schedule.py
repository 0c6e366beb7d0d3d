"""What the runtime does in a forward pass of a plan: blocks in execution order, where they run, what each needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from bigload.devices import Device
from bigload.dtypes import DTYPES, DType
from bigload.planning.model import families
from bigload.planning.model.experts import RoutedExperts
from bigload.planning.model.kv_cache import is_of_main_encoder
from bigload.planning.model.module_tree import ModuleNode, key_above
from bigload.planning.model.structure import ModelStructure
from bigload.planning.model.units import Unit, UnitKind
from bigload.planning.plan import Plan

_HEADS = tuple(name.removesuffix(".weight") for name in families.HEADS)
_EMBEDDINGS = tuple(name.removesuffix(".weight") for name in families.EMBEDDINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """A block of the model, as large as the runtime streams it, or a module beside the blocks.

    Attributes:
        name: Of its largest part.
        home: Where its weights live.
        runs_on: Where it computes.
        dense_bytes: Weights that every token needs.
        routed_bytes: Of routed experts.
        routed_home: Where they live.
        expert_bytes: Of one of them.
        active_share: Share of them that one token chooses.
        are_separate: Whether each expert is stored by itself, and copied together by who loads it.
        cache_bytes: KV cache of the whole context, of all sequences.
        num_layers: Transformer blocks in it: each has small operations beside its weights.
        is_encoder: Whether it runs once for a prompt, and for no token that follows.
    """

    name: str
    home: Device
    runs_on: Device
    dense_bytes: int
    routed_bytes: int = 0
    routed_home: Device | None = None
    expert_bytes: int = 0
    active_share: float = 1.0
    are_separate: bool = False
    cache_bytes: int = 0
    num_layers: int = 0
    is_encoder: bool = False

    @property
    def is_streamed(self) -> bool:
        return self.home != self.runs_on

    @property
    def streams_experts(self) -> bool:
        return bool(self.routed_bytes) and self.routed_home != self.runs_on

    def routed_share(self, tokens: int) -> float:
        """Return the share of its experts that so many tokens choose, if each expert is as likely as the others."""
        return 1.0 if self.active_share >= 1 else 1 - (1 - self.active_share) ** tokens


class Visit(NamedTuple):
    """One run of a block in a forward pass.

    A lookup takes a row of an embedding for each token, and no product. The head runs for the last token of a prompt.
    """

    block: int
    is_lookup: bool = False
    is_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSchedule:
    """The blocks of a model under a plan.

    Attributes:
        blocks: In execution order.
        visits: Which run, in order, in a pass over a prompt.
        dtype: Of most weights, in memory.
        stored_share: Bytes in files for one in memory: other than 1 where weights are cast.
        attention_width: Of all heads of queries together; 0 if unknown.
        window_bytes: Weights that may wait for their block to run.
    """

    blocks: tuple[TimedBlock, ...]
    visits: tuple[Visit, ...]
    dtype: DType
    stored_share: float
    attention_width: int
    window_bytes: int

    @property
    def is_encoder_decoder(self) -> bool:
        return any(block.is_encoder for block in self.blocks)

    @property
    def token_visits(self) -> tuple[Visit, ...]:
        """The visits of a pass over one further token."""
        found = [visit for visit in self.visits if not self.blocks[visit.block].is_encoder]
        return tuple(visit for visit, _ in groupby(found))


def schedule_of(plan: Plan, structure: ModelStructure) -> BlockSchedule:
    """Return what a forward pass of `plan` does."""
    workload = plan.options.workload
    units = structure.units(workload)
    if any(part.name not in plan.homes for unit in units for part in unit.parts):  # experts have keys of their own
        units = structure.units(workload, split_experts=True)
    blocks: list[TimedBlock] = []
    block_of: list[int] = []
    has_decoder = any(".decoder." in f".{part.name}." for unit in units for part in unit.parts)
    for unit in units:
        if unit.is_routed:
            home = plan.homes[unit.parts[0].name]
            names = {key_above(part.name, structure.experts) for part in unit.parts}
            blocks[-1] = _with_experts(blocks[-1], [structure.experts[name][1] for name in names if name], home)
        else:
            blocks.append(_block(unit, plan, structure, has_decoder=has_decoder))
        block_of.append(len(blocks) - 1)
    order = [block for block, _ in groupby(block_of[index] for index in structure.visits(units))]
    lookups = {block_of[index] for index, unit in enumerate(units) if unit.name.endswith(_EMBEDDINGS)}
    heads = {block_of[index] for index, unit in enumerate(units) if _is_head(unit, structure)}
    last = {block: place for place, block in enumerate(order)}
    return BlockSchedule(
        blocks=tuple(blocks),
        visits=tuple(
            Visit(
                block,
                is_lookup=block in lookups and (block not in heads or place < last[block]),
                is_head=block in heads and place == last[block],
            )
            for place, block in enumerate(order)
        ),
        dtype=workload.load_dtype or _dtype(_largest_part(structure, units)),
        stored_share=1.0 if workload.load_dtype is None else plan.total_bytes / (plan.weights_bytes or 1),
        attention_width=_attention_width(structure),
        window_bytes=_window(plan, blocks),
    )


def _block(unit: Unit, plan: Plan, structure: ModelStructure, *, has_decoder: bool) -> TimedBlock:
    moved = next((part for part in unit.parts if not part.is_held), unit.parts[0])
    home = plan.homes[moved.name]
    name = unit.name
    path = name.split(".")
    layers = sum(part.kind is UnitKind.BLOCK for part in unit.parts)
    block = TimedBlock(
        name=name,
        home=home,
        runs_on=home if home.is_accelerator else plan.execution_device,
        dense_bytes=unit.num_bytes + unit.held_bytes,
        cache_bytes=unit.cache_bytes,
        num_layers=layers,
        is_encoder=has_decoder and "encoder" in path and "decoder" not in path and is_of_main_encoder(name),
    )
    found = [structure.experts[part.name][1] for part in unit.parts if part.name in structure.experts]
    routed = _with_experts(block, found, home)
    return replace(routed, dense_bytes=block.dense_bytes - routed.routed_bytes)


def _with_experts(block: TimedBlock, found: Sequence[RoutedExperts], home: Device) -> TimedBlock:
    """Return `block` with these routed experts beside its other weights."""
    if not found:
        return block
    routed = sum(experts.num_bytes for experts in found)
    return replace(
        block,
        num_layers=max(block.num_layers, len(found)),
        routed_bytes=routed,
        routed_home=home,
        expert_bytes=max((experts.largest_expert_bytes for experts in found), default=0),
        active_share=sum(experts.active_bytes for experts in found) / (routed or 1),
        are_separate=any(experts.are_separate for experts in found),
    )


def _is_head(unit: Unit, structure: ModelStructure) -> bool:
    """Return whether the unit makes the logits: a model without a head has another last part."""
    is_named = unit.name.endswith((*_HEADS, *_EMBEDDINGS))
    return is_named and any(part.name == structure.head_part for part in unit.parts)


def _largest_part(structure: ModelStructure, units: Sequence[Unit]) -> ModuleNode:
    parts = (part for unit in units for part in unit.parts)
    node = structure.root
    for key in max(parts, key=lambda part: part.num_bytes).name.split(".") if units else ():
        node = node.children.get(key, node)
    return node


def _dtype(node: ModuleNode) -> DType:
    sizes: dict[DType, int] = {}
    for tensor in node.all_tensors():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=DTYPES["BF16"])


def _attention_width(structure: ModelStructure) -> int:
    config = structure.config
    heads, width = config.number("num_heads"), config.head_dim
    return heads * width if heads and width else config.number("hidden_size") or 0


def _window(plan: Plan, blocks: Sequence[TimedBlock]) -> int:
    """Return the prefetch window as the runtime chooses it: all of the workspace but the block that runs."""
    resident = 0 if plan.resident_experts is None else plan.resident_experts.num_bytes
    reserved = sum(use.workspace_bytes for use in plan.devices if use.device == plan.execution_device) - resident
    streamed = [block.dense_bytes for block in blocks if block.is_streamed]
    experts = [block.expert_bytes for block in blocks if block.streams_experts]
    together = max(streamed, default=0) + max(experts, default=0)
    return max(reserved - together, 0) if reserved else 2 * together
