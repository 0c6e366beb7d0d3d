"""Fallback when the next module does not fit on a device: place the first later one that is small enough."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn

from bigload.runtime.device_map.module_queue import ModuleOrTensor, ModuleQueue, ModuleSplitter, QueuedModule
from bigload.runtime.device_map.module_sizes import Size, class_names, convert_file_size_to_int
from bigload.runtime.modules.module_names import prefixes


class TieGroups:
    """Which items of a work list share parameters.

    `counted_again` has the sizes of parameters that are counted under each of their names; where each counts under its
    first name only, there is nothing to take off.
    """

    def __init__(self, groups: Iterable[Sequence[str]], counted_again: Mapping[str, Size] | None = None) -> None:
        self._counted_again = counted_again or {}
        self._groups_under: dict[str, dict[int, Sequence[str]]] = {}
        for number, group in enumerate(groups):
            for name in group:
                for prefix in prefixes(name):
                    self._groups_under.setdefault(prefix, {})[number] = group

    def partners(self, item: QueuedModule, work: ModuleQueue) -> list[tuple[str, QueuedModule]]:
        """Return the other items that have to be where `item` is, each with the tied parameter that it holds.

        First come those tied to `item` itself, one that is tied by two parameters twice; then, once each, those tied to
        them in turn.
        """
        found = list(self._tied_to(item, work))
        reached = {item, *(holder for _, holder in found)}
        for _, holder in found:  # grows while it is walked
            for name, another in self._tied_to(holder, work):
                if another not in reached:
                    reached.add(another)
                    found.append((name, another))
        return found

    def _tied_to(self, item: QueuedModule, work: ModuleQueue) -> Iterator[tuple[str, QueuedModule]]:
        inside = f"{item.name}."
        for group in self._groups_under.get(item.name, {}).values():
            for name in group:
                holder = work.holder(name) if not f"{name}.".startswith(inside) else None
                if holder is not None:
                    yield name, holder

    def size_with(self, item: QueuedModule, partners: Iterable[tuple[str, QueuedModule]]) -> Size:
        """Return the bytes of `item` and its partners; one that comes twice counts twice."""
        others = (holder.num_bytes - self._counted_again.get(name, 0) for name, holder in partners)
        return item.num_bytes + sum(others)


def fallback_allocate(
    modules: list[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, Size],
    size_limit: Size | str,
    no_split_module_classes: Iterable[str] | str | None = None,
    tied_parameters: Iterable[Sequence[str]] | None = None,
) -> tuple[str | None, ModuleOrTensor, list[tuple[str, nn.Module | torch.Tensor]]]:
    """Return the first module or piece of one that takes `size_limit` at most with its ties, and what is left without.

    Modules are looked through in order, each before its pieces. What the module that was found lies in is replaced by
    its pieces. If there is none, or the limit is not a size, the answer is `None` twice and `modules` as they were.

    Args:
        modules: Modules and tensors by their names in the model.
        module_sizes: Bytes by name, as `compute_module_sizes` returns them.
        size_limit: Bytes, or text such as `20GiB`.
        no_split_module_classes: Classes whose modules have no pieces.
        tied_parameters: Groups of names, as `find_tied_parameters` returns them.

    >>> model = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(2, 2)})
    >>> sizes = {"m": 384, "m.a": 360, "m.b": 24}
    >>> name, _, left = fallback_allocate([("m", model)], sizes, 100)
    >>> name, [name for name, _ in left]
    ('m.b', ['m.a'])
    """
    try:
        limit = convert_file_size_to_int(size_limit)
    except ValueError:
        return None, None, modules
    work = ModuleQueue(modules, ModuleSplitter(module_sizes, class_names(no_split_module_classes)))
    name = first_that_fits(work, limit, TieGroups(tied_parameters or (), module_sizes))
    if name is None:
        return None, None, modules
    work.bring_forward(name)
    found, *left = work
    return name, found.held, [(item.name, item.held) for item in left if item.held is not None]


def first_that_fits(work: ModuleQueue, limit: Size, ties: TieGroups, *, skip: QueuedModule | None = None) -> str | None:
    """Return the name of the first item on `work`, or piece of one, that takes `limit` at most with its ties."""
    trial = work.copy()
    item = trial.first
    while item is not None:
        if skip is None or item.name != skip.name:
            if ties.size_with(item, ties.partners(item, trial)) <= limit:
                return item.name
            if trial.can_split(item):
                item = trial.split(item)
                continue
        item = trial.following(item)
    return None
