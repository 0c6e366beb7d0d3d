"""Structure of a model as planners see it: units with all that they need, ties, modules left out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from bigload.checkpoint.model import Checkpoint, TensorInfo
from bigload.dtypes import DType
from bigload.errors import OptionError
from bigload.planning.choices import NameScheme
from bigload.planning.load_dtype import as_loaded
from bigload.planning.model import families
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.experts import RoutedExperts, dense_parts, routed_experts
from bigload.planning.model.kv_cache import BlockCache
from bigload.planning.model.module_tree import ModuleNode, blocks_of, build_tree, key_above, without
from bigload.planning.model.mtp_layers import extra_layers
from bigload.planning.model.run_memory import NO_RUN_MEMORY, MemoryModel, RunMemory, memory_model
from bigload.planning.model.ties import TiedGroup, find_ties
from bigload.planning.model.units import Part, Unit, UnitKind, cut_into_units, parts_in_order
from bigload.planning.options import PlanOptions
from bigload.planning.workload import Workload

if TYPE_CHECKING:
    from bigload.planning.model.adapters import AdapterBytes


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """A model as names, sizes and config tell of it; read once, asked for several workloads.

    Attributes:
        root: The module tree, without what is left out, with the sizes that tensors have in memory.
        left_out: Modules, of `left_out_bytes` in all, that no ordinary forward pass runs, and that get no device.
        no_split: Patterns of modules to keep whole, instead of blocks.
        is_fused_in_memory: Whether the runtime streams all experts of a block together.
        adapters: Bytes of adapters, which the sizes of tensors in `root` include.
    """

    checkpoint: Checkpoint
    config: ModelConfig
    root: ModuleNode
    ties: tuple[TiedGroup, ...]
    left_out: tuple[str, ...]
    left_out_bytes: int
    no_split: tuple[str, ...] = ()
    is_fused_in_memory: bool = False
    adapters: tuple[AdapterBytes, ...] = ()

    @property
    def shared(self) -> tuple[str, ...]:
        """Stored tensors that take no memory of their own, because they are copies of others."""
        return tuple(name for tie in self.ties for name in tie.copies)

    @property
    def extra_layers(self) -> tuple[str, ...]:
        """Modules of `left_out` that only predict further tokens."""
        return self.left_out[len(_computed_modules(self.checkpoint)) :]

    @cached_property
    def memory(self) -> MemoryModel:
        return memory_model(blocks_of(self.root), self.checkpoint.tensors, self.config)

    def run_memory(self, workload: Workload) -> RunMemory:
        """Return what a forward pass needs beside the weights; without a context no block is looked at for it."""
        return self.memory.at(workload) if workload.context else NO_RUN_MEMORY

    @cached_property
    def experts(self) -> Mapping[str, tuple[ModuleNode, RoutedExperts]]:
        """The blocks that have routed experts, by name."""
        found = ((block, routed_experts(block, self.config)) for block in blocks_of(self.root))
        return {block.name: (block, experts) for block, experts in found if experts is not None}

    @cached_property
    def _units(self) -> tuple[Unit, ...]:
        return cut_into_units(self.root, self.ties, no_split=self.no_split, shared=self.shared)

    @cached_property
    def _whole_parts(self) -> tuple[Unit, ...]:
        parts = parts_in_order(self.root, self.ties, no_split=self.no_split)
        return tuple(Unit(parts=(part,)) for part in parts)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The place in a forward pass of every module that is placed as a whole, stored or not."""
        root = self.root
        absent = [module for tie in self.ties for module in tie.absent_modules]
        if absent:
            tensors = list(root.all_tensors())
            start = tensors[0].span.start
            nothing = replace(tensors[0], shape=(0,), span=tensors[0].span._replace(stop=start), strides=None)
            empty = [replace(nothing, name=f"{module}.weight") for module in absent]
            root = build_tree({tensor.name: tensor for tensor in (*tensors, *empty)})
        parts = parts_in_order(root, self.ties, no_split=self.no_split)
        return {part.name: rank for rank, part in enumerate(parts)}

    def in_execution_order(self, names: Collection[str]) -> list[str]:
        """Return keys of a device map in the order in which a forward pass runs them; pieces of a block keep theirs."""
        ranks = self._ranks
        return sorted(names, key=lambda name: len(ranks) if (key := key_above(name, ranks)) is None else ranks[key])

    def visits(self, units: Sequence[Unit]) -> tuple[int, ...]:
        """Return the indexes of `units` in the order in which a forward pass runs them, some several times.

        A unit of tied weights runs wherever one of its names stands: as the embedding at the beginning, as the head at
        the end. Each time the pass goes to its device. A shared block is visited by every layer that uses it.
        """
        unit_of = {part.name: index for index, unit in enumerate(units) for part in unit.parts}
        for tie in self.ties:
            key = key_above(tie.stored[0], unit_of)
            for module in tie.absent_modules:
                if key is not None and key_above(module, unit_of) is None:
                    unit_of[module] = unit_of[key]
        return tuple(index for index, _ in groupby(unit_of[name] for name in self.in_execution_order(unit_of)))

    def units(self, workload: Workload, *, split_experts: bool = False) -> tuple[Unit, ...]:
        """Return the units in execution order, with the bytes that `workload` needs beside their weights."""
        needs = self.run_memory(workload)
        units = self._units
        if needs.cache_bytes or needs.logits_bytes:
            units = _with_needs(units, needs, self.head_part, self.ties)
        return tuple(piece for unit in units for piece in self._pieces(unit, split_experts=split_experts))

    def whole_parts(self, workload: Workload) -> tuple[Unit, ...]:
        """Return what stays whole, each module a unit by itself, with the bytes that `workload` needs beside weights.

        Tensors that are copies of others count: modules that are tied may be in different places.
        """
        return _with_needs(self._whole_parts, self.run_memory(workload), self.head_part, self.ties)

    def _pieces(self, unit: Unit, *, split_experts: bool) -> Iterator[Unit]:
        """Yield `unit`, or the dense part of its block and the routed experts that ride on it."""
        sparse = [part for part in unit.parts if part.name in self.experts]
        if not sparse:
            yield unit
        elif split_experts and len(sparse) == 1:
            block, experts = self.experts[sparse[0].name]
            dense = list(_dense(block, experts, sparse[0]))
            yield Unit(parts=tuple(p for part in unit.parts for p in (dense if part is sparse[0] else [part])))
            yield Unit(parts=tuple(self._routed(block, experts)), is_routed=True)
        else:
            yield Unit(parts=tuple(self._weighted(part) for part in unit.parts))

    def _weighted(self, part: Part) -> Part:
        """Return a whole block whose tokens need only some of its experts."""
        if part.name not in self.experts or self.is_fused_in_memory:
            return part
        _, experts = self.experts[part.name]
        return part._replace(token_bytes=part.num_bytes - experts.num_bytes + experts.active_bytes)

    def _routed(self, block: ModuleNode, experts: RoutedExperts) -> Iterator[Part]:
        """Yield the modules of routed experts; separate ones are streamed one by one, as tokens choose them."""
        for name in experts.modules:
            node = block
            for key in name.removeprefix(f"{block.name}.").split("."):
                node = node.children[key]
            num_bytes = node.num_bytes
            active = -(-num_bytes * experts.active_bytes // max(experts.num_bytes, 1))
            yield Part(
                name=name,
                kind=UnitKind.MODULE,
                num_bytes=num_bytes,
                token_bytes=None if self.is_fused_in_memory else active,
                stream_bytes=active if experts.are_separate and not self.is_fused_in_memory else None,
            )

    def loaded_as(self, dtype: DType | None) -> ModelStructure:
        """Return the structure with the sizes that tensors have when weights are converted to `dtype`."""
        root = _tree(self.checkpoint, dtype, self.adapters)
        kept = without(root, self.left_out)
        return replace(self, root=kept, left_out_bytes=root.num_bytes - kept.num_bytes)

    def needs_by_unit(self) -> tuple[list[list[BlockCache]], int | None]:
        """Return the caches of every unit of whole blocks, and the index of the unit that returns the logits."""
        names = [[part.name for part in unit.parts] for unit in self._units]
        unit_of = {name: index for index, parts in enumerate(names) for name in parts}
        caches: list[list[BlockCache]] = [[] for _ in names]
        holders = _cache_holders([cache.block for cache in self.memory.caches], unit_of, self.ties)
        for cache in self.memory.caches:
            if (index := unit_of.get(holders[cache.block])) is not None:
                caches[index].append(cache)
        head = self.head_part
        return caches, None if head is None else unit_of[head]

    @cached_property
    def head_part(self) -> str | None:
        """Return the name of the part that returns the logits: the head, or the embedding that it shares."""
        names = dict.fromkeys(part.name for unit in self._units for part in unit.parts)
        tensors = [name for name in self.checkpoint.tensors if name.endswith(families.HEADS)]
        shared = [
            tie.stored[0]
            for tie in self.ties
            if any(f"{m}.weight".endswith(families.HEADS) for m in tie.absent_modules)
        ]
        for tensor in (*tensors, *shared):
            if (found := key_above(tensor, names)) is not None:
                return found
        return next(reversed(names), None)


def read_structure(
    checkpoint: Checkpoint, options: PlanOptions, *, ties: Sequence[TiedGroup] | None = None
) -> ModelStructure:
    """Read the structure of a checkpoint from its names, shapes and config; tied tensors are compared, unless given."""
    if options.quantize:
        from bigload.planning.quantised_checkpoint import as_quantised  # few plans need it

        checkpoint = as_quantised(checkpoint, options.quantize)
    config = ModelConfig(checkpoint.config)
    ties = find_ties(checkpoint) if ties is None else ties
    dtype = options.workload.load_dtype
    adapters: tuple[AdapterBytes, ...] = ()
    if options.lora:
        from bigload.planning.model.adapters import adapter_bytes  # few plans need it

        adapters = tuple(adapter_bytes(each, checkpoint, ties, dtype) for each in options.lora)
    root = _tree(checkpoint, dtype, adapters)
    computed = _computed_modules(checkpoint)
    left_out = computed if options.keep_extra_layers else (*computed, *extra_layers(root, config))
    kept = without(root, left_out)
    structure = ModelStructure(
        checkpoint=checkpoint,
        config=config,
        root=kept,
        ties=_present(ties, left_out),
        left_out=left_out,
        left_out_bytes=root.num_bytes - kept.num_bytes,
        no_split=options.no_split,
        is_fused_in_memory=options.names is NameScheme.TRANSFORMERS,
        adapters=adapters,
    )
    _check_patterns(structure)
    return structure


def _computed_modules(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return modules of a GGUF file that hold what transformers computes from the config of a model."""
    if checkpoint.format != "gguf":
        return ()
    from bigload.checkpoint.formats.gguf.rope import FACTOR_TENSORS  # few plans need it

    return tuple(name.removesuffix(".weight") for name in FACTOR_TENSORS if name in checkpoint.tensors)


def _tree(checkpoint: Checkpoint, dtype: DType | None, adapters: Sequence[AdapterBytes]) -> ModuleNode:
    tensors = as_loaded(checkpoint.tensors, dtype)
    if adapters:
        from bigload.planning.model.adapters import with_bytes_beside

        tensors = with_bytes_beside(tensors, adapters)
    return build_tree(tensors)


def _present(ties: Sequence[TiedGroup], left_out: tuple[str, ...]) -> tuple[TiedGroup, ...]:
    """Return `ties` without tensors of modules that are left out."""
    prefixes = tuple(f"{name}." for name in left_out)

    def kept(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if not f"{name}.".startswith(prefixes))

    if not prefixes:
        return tuple(ties)
    trimmed = (
        tie._replace(
            stored=kept(tie.stored),
            absent_modules=kept(tie.absent_modules),
            copies=kept(tie.copies),
            modules=kept(tie.modules),
        )
        for tie in ties
    )
    return tuple(tie for tie in trimmed if tie.stored)


def _check_patterns(structure: ModelStructure) -> None:
    for pattern in structure.no_split:
        if not any(node.name and fnmatchcase(node.name, pattern) for node in structure.root.walk()):
            raise OptionError(
                f"--no-split {pattern}: no module has such a name",
                hint="bigload inspect --depth 9 lists the modules; a pattern is, for example, 'model.layers.*'",
            )


def _with_needs(
    units: Sequence[Unit], needs: RunMemory, head: str | None, ties: Sequence[TiedGroup]
) -> tuple[Unit, ...]:
    """Return `units` with caches at the blocks that keep them, and the logits at the head."""
    holders = _cache_holders(needs.cache_bytes, {part.name for unit in units for part in unit.parts}, ties)
    caches: dict[str, int] = {}
    for block, num_bytes in needs.cache_bytes.items():
        caches[holders[block]] = caches.get(holders[block], 0) + num_bytes

    def needing(part: Part) -> Part:
        cache, logits = caches.get(part.name, 0), needs.logits_bytes if part.name == head else 0
        return part._replace(cache_bytes=cache, logits_bytes=logits) if cache or logits else part

    return tuple(replace(unit, parts=tuple(map(needing, unit.parts))) for unit in units)


def _cache_holders(blocks: Iterable[str], names: Collection[str], ties: Sequence[TiedGroup]) -> dict[str, str]:
    """Return by block the part that its cache is at; nothing's name where no part has it.

    The cache of a block that is cut around a shared module is at that module, whose attention writes nearly all of it.
    """
    shared = {module: key_above(tie.stored[0], names) for tie in ties for module in tie.modules}

    def holder(block: str) -> str:
        inside = next((key for module, key in shared.items() if module.startswith(f"{block}.")), None)
        return key_above(block, names) or inside or ""

    return {block: holder(block) for block in blocks}


def _dense(block: ModuleNode, experts: RoutedExperts, whole: Part) -> Iterator[Part]:
    """Yield what a block has beside routed experts; its cache is at the first of it."""
    for index, piece in enumerate(dense_parts(block, experts)):
        is_held = isinstance(piece, TensorInfo)
        yield Part(
            name=piece.name,
            kind=UnitKind.PARAMETER if is_held else UnitKind.MODULE,
            num_bytes=piece.num_bytes,
            is_held=is_held,
            cache_bytes=whole.cache_bytes if index == 0 else 0,
            logits_bytes=whole.logits_bytes if index == 0 else 0,
        )
