"""First fit: fill the devices in order, module by module, and split what does not fit.

This is the planning of `accelerate.infer_auto_device_map` 1.15, decision for decision, except for what is wrong there:
buffers of split modules get a device, a limit on the disk holds, ties are looked up by whole names, and tensors that a
split module owns itself may be tied. Being greedy it is not the best there is; the policies in `bigload.planning` are.

The main devices keep room for the largest layer that is still without a device, so that offloaded layers can be brought
in one at a time. The last layer of all needs none.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from bigload.errors import DoesNotFitError
from bigload.runtime.device_map.device_memory import DeviceKey
from bigload.runtime.device_map.module_queue import ModuleOrTensor, ModuleQueue, QueuedModule
from bigload.runtime.device_map.module_sizes import Size, class_names, convert_file_size_to_int
from bigload.runtime.modules.module_names import prefixes
from bigload.units import format_size

_logger = logging.getLogger(__name__)

Partners = Sequence[tuple[str, QueuedModule]]


class TieGroups:
    """Items of a work list that share parameters.

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


@dataclass(eq=False)
class FirstFit:
    """One run. It leaves in `used` what each device took, and in `needed` what a device that got nothing would need."""

    work: ModuleQueue
    ties: TieGroups
    limits: Mapping[DeviceKey, Size]
    fallback: bool
    verbose: bool

    def __post_init__(self) -> None:
        self.used: dict[DeviceKey, Size] = dict.fromkeys(self.limits, 0)
        self.needed: dict[DeviceKey, Size] = {}
        self._left = list(self.limits)
        self._main = main_devices(self._left)
        self._device_map: OrderedDict[str, DeviceKey] = OrderedDict()

    def place(self, model_name: str) -> OrderedDict[str, DeviceKey]:
        """Return a device for every item of the work list, in the order in which they were placed."""
        total = sum(item.num_bytes for item in self.work)
        while (item := self.work.take_first()) is not None:
            partners = self.ties.partners(item, self.work)
            size = self.ties.size_with(item, partners)
            if size <= self._room:
                self._put(item, partners, size)
            elif not (self._split_partner(item, partners) or self._split(item) or self._fall_back(item, size)):
                self.work.put_first(item)
                self._go_on(size)
                if not self._left:
                    raise self._does_not_fit(model_name, total)
        return self._device_map

    @property
    def _device(self) -> DeviceKey:
        return self._left[0]

    @property
    def _reserve(self) -> Size:
        return self.work.largest_layer if self._device in self._main else 0

    @property
    def _room(self) -> Size:
        return self.limits[self._device] - self._reserve - self.used[self._device]

    def _put(self, item: QueuedModule, partners: Partners, size: Size) -> None:
        self._say(
            "%s (%s bytes with ties) goes to %s, which has room for %s", item.name, size, self._device, self._room
        )
        self.used[self._device] += size
        self._device_map[item.name] = self._device
        for holder in dict.fromkeys(holder for _, holder in partners):
            self._say("%s is placed with it, as it is tied", holder.name)
            self.work.remove(holder)
            self._device_map[holder.name] = self._device

    def _split_partner(self, item: QueuedModule, partners: Partners) -> bool:
        """Split the first tied item that can be, if this one alone has room: then less has to go along."""
        holder = next((holder for _, holder in partners if self.work.can_split(holder)), None)
        if holder is None or item.num_bytes > self._room:
            return False
        self._say("%s is split, as it is tied to %s", holder.name, item.name)
        self.work.put_first(item)
        self.work.split(holder)
        return True

    def _split(self, item: QueuedModule) -> bool:
        if item.num_bytes < self._room or not self.work.can_split(item):
            return False
        self._say("%s (%s bytes) is split: %s has room for %s", item.name, item.num_bytes, self._device, self._room)
        self.work.put_first(item)
        self.work.split(item)
        return True

    def _fall_back(self, item: QueuedModule, size: Size) -> bool:
        """Bring a later module forward, if the device would stay empty otherwise."""
        if not self.fallback or self.used[self._device] or self._device == "disk":
            return False
        self.work.put_first(item)
        limit = self.limits[self._device] - max(self.work.largest_layer, size)
        found = first_that_fits(self.work, limit, self.ties, skip=item)
        if found is None:
            self.work.remove(item)
            return False
        self._say("%s is brought forward: it fits on %s", found, self._device)
        self.work.bring_forward(found)
        return True

    def _go_on(self, size: Size) -> None:
        """Leave the current device, which keeps its reserve."""
        device, reserve = self._device, self._reserve
        if not self.used[device]:
            self.needed[device] = size + reserve
        self.used[device] += reserve
        self._say("%s is full", device)
        del self._left[0]

    def _does_not_fit(self, model_name: str, total: Size) -> DoesNotFitError:
        unplaced = sum(item.num_bytes for item in self.work)
        return DoesNotFitError(
            model_name,
            needed_bytes=math.ceil(total),
            usable_bytes=int(total - unplaced),
            shortfalls={"total": math.ceil(unplaced)},
            details=[f"{device}: {format_size(int(limit))}" for device, limit in self.limits.items()],
            hint="raise the limit on the disk, or drop it from max_memory: then it takes what is left over",
        )

    def _say(self, text: str, *values: object) -> None:
        if self.verbose:
            _logger.info(text, *values)


def main_devices(devices: Sequence[DeviceKey]) -> Sequence[DeviceKey]:
    """Return the devices that bring in offloaded layers: `mps`, or the first accelerator and the cpu."""
    if "mps" in devices:
        return ["mps"]
    return [*[device for device in devices if isinstance(device, int)][:1], "cpu"]


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
    work = ModuleQueue(modules, module_sizes, class_names(no_split_module_classes))
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
