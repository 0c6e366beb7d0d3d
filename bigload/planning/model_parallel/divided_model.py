"""A model divided among tensor-parallel ranks: what each step of a forward pass takes on a rank.

Weights are those that `reshard --tp` writes for a rank: both divide by `partition`. The first rank has the largest part
of every tensor, so it stands for all where stages are chosen; the rows of a plan count each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from bigload.checkpoint.model import Checkpoint, NameRanges, StoredForm, forms_of, sizes_of
from bigload.errors import OptionError
from bigload.planning.load_dtype import as_loaded
from bigload.planning.model import families
from bigload.planning.model.module_tree import blocks_of, key_above
from bigload.planning.model.run_memory import RunMemory, num_words
from bigload.planning.model.structure import ModelStructure, read_structure
from bigload.planning.model.ties import find_ties
from bigload.planning.model_parallel.rank_grid import Communication, RankGrid
from bigload.planning.model_parallel.stages import StageSizes, cut_into_stages
from bigload.planning.options import PlanOptions
from bigload.planning.tensor_parallel.partition import Partition, partition
from bigload.planning.tensor_parallel.rank_part import part_form, part_of_rank
from bigload.planning.workload import Workload

VOCABULARY_MULTIPLE = 64
"""Rows of a vocabulary that is divided are padded to a multiple of it, as vLLM does (`DEFAULT_VOCAB_PADDING_SIZE`)."""

_VOCABULARIES = (*families.EMBEDDINGS, *families.HEADS)


@dataclass(frozen=True, kw_only=True)
class DividedModel:
    """A checkpoint, here as a whole, divided among `divided.tp` ranks; `structure` is the part of the first one.

    `options` are what was asked for; the workload may be another one.
    """

    checkpoint: Checkpoint
    divided: Partition
    structure: ModelStructure
    options: PlanOptions

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, tp: int, options: PlanOptions, rules: Mapping[str, str] | None = None
    ) -> DividedModel:
        """Divide `checkpoint` among `tp` ranks; `rules` go before those of its family."""
        divided = partition(checkpoint, tp=tp, rules=rules)
        part = part_of_rank(checkpoint, divided.divisions, 0)
        structure = read_structure(part, options, ties=find_ties(checkpoint))
        return cls(checkpoint=checkpoint, divided=divided, structure=structure, options=options)

    def run_memory(self, workload: Workload) -> RunMemory:
        """Return what a rank needs beside its weights: ranks gather the logits of the whole vocabulary."""
        needs = self.structure.run_memory(workload)
        if not needs.logits_bytes or not self._own_words:
            return needs
        return needs._replace(logits_bytes=needs.logits_bytes // self._own_words * self._num_words)

    @property
    def num_blocks(self) -> int:
        return max(len(self._starts), 1)

    def stages(self, pp: int, workload: Workload) -> tuple[tuple[str, ...], ...]:
        """Return the modules of each of `pp` stages, so that the fullest rank is least full."""
        sizes = self._sizes(workload)
        if pp > max(sizes.num_pieces, 1):
            raise OptionError.of(
                "pp", pp, f"at most {sizes.num_pieces}, the number of blocks in {self.checkpoint.name}"
            )
        if not sizes.num_pieces:
            return ((),)
        cuts = cut_into_stages(sizes, pp)
        return tuple(
            tuple(dict.fromkeys(self._names[sizes.units[step]] for step in sizes.steps(*pair)))
            for pair in pairwise(cuts)
        )

    def fullest_bytes(self, pp: int, workload: Workload) -> int:
        """Return the least memory of equal GPUs on which `pp` stages fit, without overhead."""
        sizes = self._sizes(workload)
        cuts = cut_into_stages(sizes, pp) if sizes.num_pieces else (0, 0)
        held = (sizes.num_bytes(*pair) for pair in pairwise(cuts))
        return max(held) + self.run_memory(workload).activation_bytes

    def weights_bytes(self, modules: Collection[str]) -> list[int]:
        """Return the bytes that each rank of a stage of these modules holds, as they are loaded."""
        counts = Counter((self._forms[name], id(self.divided.divisions[name])) for name in self._below(modules))
        by_id = {id(division): division for division in self.divided.divisions.values()}
        return [
            sum(number * part_form(form, by_id[key], rank).num_bytes for (form, key), number in counts.items())
            for rank in range(self.divided.tp)
        ]

    def padding_bytes(self, modules: Collection[str]) -> list[int]:
        """Return the bytes of the rows that engines add to divided vocabularies of these modules, by rank."""
        names = [name for name in self._vocabularies if key_above(name, modules) is not None]
        return [sum(self._padding(name, rank) for name in names) for rank in range(self.divided.tp)]

    def kv_bytes(self, modules: Collection[str], workload: Workload) -> int:
        """Return the bytes of caches of these modules on one rank."""
        return sum(unit.cache_bytes for unit in self.structure.whole_parts(workload) if unit.name in modules)

    def not_below(self, modules: Collection[str]) -> str | None:
        """Return a tensor that is in none of `modules`, if there is one."""
        return next((name for name in self.checkpoint.tensors if key_above(name, modules) is None), None)

    def communication(self, grid: RankGrid, stages: tuple[tuple[str, ...], ...], workload: Workload) -> Communication:
        """Return what ranks of `grid` send one another."""
        within = between = 0
        for stage, modules in enumerate(stages):
            summed = self._summed(frozenset(modules), is_first=stage == 0) if grid.tp > 1 else ()
            sums = len({_summed_module(name, self.blocks) for name in summed})
            if len(grid.hosts_of(stage)) > 1:
                between += sums
            else:
                within += sums
        host_sends = len(list(grid.sends_between_hosts()))
        width = max((workload.load_dtype or self.structure.memory.dtype).bits // 8, 1)
        gathers = any(self.divided.divisions[name].dim == 0 for name in self._vocabularies)
        words = self._num_words if gathers and self.structure.memory.num_words else 0
        return Communication(
            tp=grid.tp,
            num_sums=within,
            num_host_sums=between,
            num_sends=grid.pp - 1 - host_sends,
            num_host_sends=host_sends,
            message_bytes=workload.batch * (self.structure.config.number("hidden_size") or 0) * width,
            logits_bytes=workload.batch * words * width if grid.tp > 1 else 0,
            logits_cross_hosts=len(grid.hosts_of(grid.pp - 1)) > 1,
        )

    def _summed(self, modules: Collection[str], *, is_first: bool) -> Iterator[str]:
        """Yield the layers of a stage whose outputs ranks add up; rows of an embedding that others hold are zeros."""
        yield from (name for name in self.divided.summed if key_above(name, modules) is not None)
        for name in self._vocabularies if is_first else ():
            is_divided = self.divided.divisions[name].dim == 0 and name.endswith(families.EMBEDDINGS)
            if is_divided and key_above(name, modules) is not None:
                yield name

    @cached_property
    def blocks(self) -> frozenset[str]:
        """Names of the repeated blocks."""
        return frozenset(block.name for block in blocks_of(self.structure.root))

    @cached_property
    def _forms(self) -> Mapping[str, StoredForm]:
        return forms_of(as_loaded(self.checkpoint.tensors, self.options.workload.load_dtype))

    @cached_property
    def _ranges(self) -> NameRanges:
        return NameRanges(sizes_of(self.checkpoint.tensors))

    def _below(self, modules: Iterable[str]) -> Iterator[str]:
        for module in modules:
            start, stop = self._ranges.of(module)
            if module in self._forms:
                yield module
            yield from self._ranges.names[start:stop]

    @cached_property
    def _vocabularies(self) -> tuple[str, ...]:
        return tuple(name for name in self.checkpoint.tensors if name.endswith(_VOCABULARIES))

    @cached_property
    def _num_words(self) -> int:
        return num_words(self.checkpoint.tensors)

    @cached_property
    def _own_words(self) -> int:
        return num_words(self.structure.checkpoint.tensors)

    def _padding(self, name: str, rank: int) -> int:
        division, form = self.divided.divisions[name], self._forms[name]
        if division.dim != 0 or not form.shape[0] or self.divided.tp == 1:
            return 0
        padded = -(-form.shape[0] // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        rows = -(-padded // self.divided.tp)
        return max(rows - division.length(rank), 0) * (form.num_bytes // form.shape[0])

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.structure.whole_parts(Workload()))

    @cached_property
    def _visits(self) -> tuple[int, ...]:
        return self.structure.visits(self.structure.whole_parts(Workload()))

    @cached_property
    def _part_padding(self) -> Mapping[str, int]:
        """Padding on the first rank by the part that has it."""
        padding, names = Counter[str](), frozenset(self._names)
        for name in self._vocabularies:
            if (holder := key_above(name, names)) is not None:
                padding[holder] += self._padding(name, 0)
        return padding

    def _sizes(self, workload: Workload) -> StageSizes:
        """Return the steps of a forward pass; the head has the logits where it runs last."""
        units, logits = self.structure.whole_parts(workload), self.run_memory(workload).logits_bytes
        padding = self._part_padding
        head = self.structure.head_part
        last = max((step for step, unit in enumerate(self._visits) if self._names[unit] == head), default=None)
        held = [unit.num_bytes + unit.held_bytes + unit.cache_bytes + padding.get(unit.name, 0) for unit in units]
        return StageSizes(
            units=self._visits,
            held_bytes=tuple(held[unit] for unit in self._visits),
            own_bytes=tuple(logits if step == last else 0 for step in range(len(self._visits))),
            starts=self._starts,
        )

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Steps at which a stage may begin: those that begin a block, the first of them with all before it."""
        seen: set[int] = set()
        blocks: list[tuple[str | None, bool]] = []
        for unit in self._visits:
            blocks.append((key_above(self._names[unit], self.blocks), unit in seen))
            seen.add(unit)
        starts: list[int] = []
        current: str | None = None
        for step, (block, is_repeated) in enumerate(blocks):
            # a module that blocks share runs within the block that follows
            found = (blocks[step + 1][0] if step + 1 < len(blocks) else None) if is_repeated else block
            if found is not None and found != current:
                starts.append(step)
                current = found
        return (0, *starts[1:]) if self._visits else ()


def _summed_module(layer: str, blocks: Collection[str]) -> tuple[str, ...]:
    """Return the block of `layer`, and its part whose output ranks add up: all experts of a block make one sum."""
    block = key_above(layer, blocks)
    if block is None:
        return (layer,)
    part, *rest = layer[len(block) + 1 :].split(".")
    is_listed = bool(rest) and rest[0].isdecimal() and "expert" not in part  # T5 has its layers in a list
    return block, part, *rest[:is_listed]
