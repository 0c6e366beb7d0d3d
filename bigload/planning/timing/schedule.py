"""Steps of the runtime in a forward pass of a plan: blocks in execution order, where they run, what each needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from bigload.checkpoint.model import TensorInfo
from bigload.devices import CPU, Device
from bigload.dtypes import DTYPES, DType
from bigload.planning.model import families
from bigload.planning.model.block_shapes import is_made_once
from bigload.planning.model.experts import RoutedExperts, dense_parts
from bigload.planning.model.kv_cache import is_of_main_encoder
from bigload.planning.model.module_tree import ModuleNode, key_above, rows_of
from bigload.planning.model.structure import ModelStructure
from bigload.planning.model.units import Unit, UnitKind
from bigload.planning.plan import Plan

_HEADS = tuple(name.removesuffix(".weight") for name in families.HEADS)
_EMBEDDINGS = tuple(name.removesuffix(".weight") for name in families.EMBEDDINGS)

_EXPERT_MATRICES = 2
"""Gate and up projections, which transformers joins, and the one down."""


class TimedBlock(NamedTuple):
    """A block of the model, as large as the runtime streams it, or a module beside the blocks.

    Attributes:
        name: Of its largest part.
        dense_bytes: Weights beside routed experts.
        active_share: Share of them that one token chooses.
        are_separate: Whether each expert is stored by itself, and copied together by who loads it.
        cache_bytes: KV cache of the whole context, of all sequences.
        once_bytes: Of those, keys and values of an encoder's output: the first token needs them, no further one.
        num_matrices: Modules with a matrix, beside routed experts: each has small operations around its product.
        num_once_matrices: Of those, the ones in `once_bytes`.
        num_routed_matrices: Of all routed experts; 0 if their number is unknown.
        dense_rows: Rows of the matrices in `dense_bytes`, see `rows_of`.
        once_rows: Of those, the ones in `once_bytes`.
        routed_rows: Rows of the matrices of all routed experts.
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
    once_bytes: int = 0
    num_matrices: int = 0
    num_once_matrices: int = 0
    num_routed_matrices: int = 0
    dense_rows: int = 0
    once_rows: int = 0
    routed_rows: int = 0
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


class BlockSchedule(NamedTuple):
    """The blocks of a model under a plan.

    Attributes:
        visits: Which run, in order, in a pass over a prompt.
        dtype: Of most weights, in memory.
        stored_share: Bytes in files for one in memory: other than 1 where weights are cast.
        attention_width: Of all heads of queries together; 0 if unknown.
        reserved_bytes: Workspace of the plan for streamed weights; 0 if it has none.
    """

    blocks: tuple[TimedBlock, ...]
    visits: tuple[Visit, ...]
    dtype: DType
    stored_share: float
    attention_width: int
    reserved_bytes: int

    @property
    def is_encoder_decoder(self) -> bool:
        return any(block.is_encoder for block in self.blocks)

    @property
    def is_in_place(self) -> bool:
        """Whether the CPU runs all streamed weights as they are stored: in pages of their files."""
        runners = {block.runs_on for block in self.blocks if block.is_streamed or block.streams_experts}
        return runners <= {CPU} and self.stored_share == 1

    @property
    def fetched(self) -> tuple[int, ...]:
        """The blocks that are fetched, but for their routed experts.

        In place, rows that are looked up are faulted in when they are used.
        """
        used = {visit.block for visit in self.visits if not (visit.is_lookup and self.is_in_place)}
        return tuple(index for index, block in enumerate(self.blocks) if block.is_streamed and index in used)

    @property
    def largest_bytes(self) -> int:
        """The largest block that is fetched, and the largest expert."""
        experts = [block.expert_bytes for block in self.blocks if block.streams_experts]
        return max((self.blocks[index].dense_bytes for index in self.fetched), default=0) + max(experts, default=0)

    @property
    def window_bytes(self) -> int:
        """The prefetch window as the runtime chooses it: all of the workspace but the block that runs."""
        largest = self.largest_bytes
        return max(self.reserved_bytes - largest, 0) if self.reserved_bytes else 2 * largest

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
            found = [structure.experts[name][1] for name in names if name]
            blocks[-1] = _with_experts(blocks[-1], found, home, structure)
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
        reserved_bytes=_reserved(plan),
    )


def _block(unit: Unit, plan: Plan, structure: ModelStructure, *, has_decoder: bool) -> TimedBlock:
    moved = next((part for part in unit.parts if not part.is_held), unit.parts[0])
    home = plan.homes[moved.name]
    name = unit.name
    path = name.split(".")
    layers = sum(part.kind is UnitKind.BLOCK for part in unit.parts)
    dense = list(_dense_tensors(unit, structure))
    once = [tensor for tensor in dense if has_decoder and is_made_once(tensor.name) and len(tensor.shape) > 1]
    block = TimedBlock(
        name=name,
        home=home,
        runs_on=home if home.is_accelerator else plan.execution_device,
        dense_bytes=unit.num_bytes + unit.held_bytes,
        cache_bytes=unit.cache_bytes,
        num_layers=layers,
        once_bytes=sum(tensor.num_bytes for tensor in once),
        num_matrices=_num_matrices(dense),
        num_once_matrices=len(once),
        dense_rows=sum(rows_of(tensor.shape) for tensor in dense),
        once_rows=sum(rows_of(tensor.shape) for tensor in once),
        is_encoder=has_decoder and "encoder" in path and "decoder" not in path and is_of_main_encoder(name),
    )
    found = [structure.experts[part.name][1] for part in unit.parts if part.name in structure.experts]
    routed = _with_experts(block, found, home, structure)
    return routed._replace(dense_bytes=block.dense_bytes - routed.routed_bytes)


def _dense_tensors(unit: Unit, structure: ModelStructure) -> Iterator[TensorInfo]:
    """Yield the tensors of `unit`, without routed experts and without copies that take no memory."""
    for name in (part.name for part in unit.parts if part.num_bytes):
        node = _node(structure, name)
        if node.name != name:  # a tensor of a module that is cut into units
            yield from (tensor for tensor in node.tensors if tensor.name == name)
            continue
        for each in dense_parts(node, structure.experts[name][1]) if name in structure.experts else (node,):
            yield from each.all_tensors() if isinstance(each, ModuleNode) else (each,)


def _num_matrices(dense: Sequence[TensorInfo]) -> int:
    """Return how many modules have a matrix; scales are no matrices of their own."""
    return len({tensor.name.rpartition(".")[0] for tensor in dense if len(tensor.shape) > 1})


def _node(structure: ModelStructure, name: str) -> ModuleNode:
    node = structure.root
    for key in name.split("."):
        node = node.children.get(key, node)
    return node


def num_expert_tensors(structure: ModelStructure) -> int:
    """Return how many tensors of the files are parts of single routed experts."""
    names = (name for _, each in structure.experts.values() if each.are_separate for name in each.modules)
    return sum(sum(1 for _ in _node(structure, name).all_tensors()) for name in names)


def _with_experts(
    block: TimedBlock, found: Sequence[RoutedExperts], home: Device, structure: ModelStructure
) -> TimedBlock:
    """Return `block` with these routed experts beside its other weights."""
    if not found:
        return block
    routed = sum(experts.num_bytes for experts in found)
    return block._replace(
        num_layers=max(block.num_layers, len(found)),
        routed_bytes=routed,
        num_routed_matrices=sum((experts.num_experts or 0) * _EXPERT_MATRICES for experts in found),
        routed_rows=sum(_node(structure, name).num_rows for experts in found for name in experts.modules),
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
    return _node(structure, max(parts, key=lambda part: part.num_bytes).name) if units else structure.root


def _dtype(node: ModuleNode) -> DType:
    sizes: dict[DType, int] = {}
    for tensor in node.all_tensors():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=DTYPES["BF16"])


def _attention_width(structure: ModelStructure) -> int:
    config = structure.config
    heads, width = config.number("num_heads"), config.head_dim
    return heads * width if heads and width else config.number("hidden_size") or 0


def _reserved(plan: Plan) -> int:
    """Return the workspace for streamed weights, without experts that stay."""
    resident = 0 if plan.resident_experts is None else plan.resident_experts.num_bytes
    return sum(use.workspace_bytes for use in plan.devices if use.device == plan.execution_device) - resident
