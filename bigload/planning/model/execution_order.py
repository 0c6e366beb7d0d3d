"""Order of a forward pass: in which order modules run, those included that are not stored or run several times.

A unit of tied weights runs wherever one of its names stands: as the embedding at the beginning, as the head at the end.
Each time the pass goes to its device. A shared block is visited by every layer that uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from bigload.planning.model.module_tree import ModuleNode, build_tree
from bigload.planning.model.ties import TiedGroup
from bigload.planning.model.units import Unit, key_above, parts_in_order


def execution_ranks(root: ModuleNode, ties: Sequence[TiedGroup], no_split: Sequence[str]) -> dict[str, int]:
    """Return the place in a forward pass of every module that is placed as a whole, stored or not."""
    absent = [module for tie in ties for module in tie.absent_modules]
    if absent:
        tensors = list(root.all_tensors())
        nothing = replace(
            tensors[0], shape=(0,), span=replace(tensors[0].span, stop=tensors[0].span.start), strides=None
        )
        root = build_tree([*tensors, *(replace(nothing, name=f"{module}.weight") for module in absent)])
    return {part.name: rank for rank, part in enumerate(parts_in_order(root, ties, no_split=no_split))}


def in_execution_order(names: Collection[str], ranks: Mapping[str, int]) -> list[str]:
    """Return keys of a device map in the order in which they run; pieces of one block keep their order."""

    def rank(name: str) -> int:
        key = key_above(name, ranks)
        return len(ranks) if key is None else ranks[key]

    return sorted(names, key=rank)


def visits(units: Sequence[Unit], ties: Sequence[TiedGroup], ranks: Mapping[str, int]) -> tuple[int, ...]:
    """Return the indexes of `units` in the order in which a forward pass runs them, some several times."""
    unit_of = {part.name: index for index, unit in enumerate(units) for part in unit.parts}
    for tie in ties:
        key = key_above(tie.stored[0], unit_of)
        for module in tie.absent_modules:
            if key is not None and key_above(module, unit_of) is None:
                unit_of[module] = unit_of[key]
    order = [unit_of[name] for name in in_execution_order(unit_of, ranks)]
    return tuple(index for place, index in enumerate(order) if place == 0 or order[place - 1] != index)
