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
from collections.abc import Mapping, Sequence

from bigload.errors import DoesNotFitError
from bigload.runtime.device_map.device_memory import DeviceKey
from bigload.runtime.device_map.first_fit_fallback import TieGroups, first_that_fits
from bigload.runtime.device_map.module_queue import ModuleQueue, QueuedModule
from bigload.runtime.device_map.module_sizes import Size
from bigload.units import format_size

_logger = logging.getLogger(__name__)

Partners = Sequence[tuple[str, QueuedModule]]


class FirstFit:
    """One run. It leaves in `used` what each device took, and in `needed` what a device that got nothing would need."""

    def __init__(
        self, work: ModuleQueue, ties: TieGroups, limits: Mapping[DeviceKey, Size], *, fallback: bool, verbose: bool
    ) -> None:
        self.used: dict[DeviceKey, Size] = dict.fromkeys(limits, 0)
        self.needed: dict[DeviceKey, Size] = {}
        self._work = work
        self._ties = ties
        self.limits = limits
        self._left = list(limits)
        self._main = main_devices(self._left)
        self._fallback = fallback
        self._is_verbose = verbose
        self._device_map: OrderedDict[str, DeviceKey] = OrderedDict()

    def place(self, model_name: str) -> OrderedDict[str, DeviceKey]:
        """Return a device for every item of the work list, in the order in which they were placed.

        Raises:
            DoesNotFitError: something found room on no device.
        """
        total = sum(item.num_bytes for item in self._work)
        while (item := self._work.take_first()) is not None:
            partners = self._ties.partners(item, self._work)
            size = self._ties.size_with(item, partners)
            if size <= self._room:
                self._put(item, partners, size)
            elif not (self._split_partner(item, partners) or self._split(item) or self._fall_back(item, size)):
                self._work.put_first(item)
                self._go_on(size)
                if not self._left:
                    raise self._does_not_fit(model_name, total)
        return self._device_map

    @property
    def _device(self) -> DeviceKey:
        return self._left[0]

    @property
    def _reserve(self) -> Size:
        return self._work.largest_layer if self._device in self._main else 0

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
            self._say("%s goes along, as it is tied", holder.name)
            self._work.remove(holder)
            self._device_map[holder.name] = self._device

    def _split_partner(self, item: QueuedModule, partners: Partners) -> bool:
        """Split the first tied item that can be, if this one alone has room: then less has to go along."""
        holder = next((holder for _, holder in partners if self._work.can_split(holder)), None)
        if holder is None or item.num_bytes > self._room:
            return False
        self._say("%s is split, as it is tied to %s", holder.name, item.name)
        self._work.put_first(item)
        self._work.split(holder)
        return True

    def _split(self, item: QueuedModule) -> bool:
        if item.num_bytes < self._room or not self._work.can_split(item):
            return False
        self._say("%s (%s bytes) is split: %s has room for %s", item.name, item.num_bytes, self._device, self._room)
        self._work.put_first(item)
        self._work.split(item)
        return True

    def _fall_back(self, item: QueuedModule, size: Size) -> bool:
        """Bring a later module forward, if the device would stay empty otherwise."""
        if not self._fallback or self.used[self._device] or self._device == "disk":
            return False
        self._work.put_first(item)
        limit = self.limits[self._device] - max(self._work.largest_layer, size)
        found = first_that_fits(self._work, limit, self._ties, skip=item)
        if found is None:
            self._work.remove(item)
            return False
        self._say("%s is brought forward: it fits on %s", found, self._device)
        self._work.bring_forward(found)
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
        unplaced = sum(item.num_bytes for item in self._work)
        return DoesNotFitError(
            model_name,
            needed_bytes=math.ceil(total),
            usable_bytes=int(total - unplaced),
            shortfalls={"total": math.ceil(unplaced)},
            details=[f"{device}: {format_size(int(limit))}" for device, limit in self.limits.items()],
            hint="raise the limit on the disk, or drop it from max_memory: then it takes what is left over",
        )

    def _say(self, text: str, *values: object) -> None:
        if self._is_verbose:
            _logger.info(text, *values)


def main_devices(devices: Sequence[DeviceKey]) -> Sequence[DeviceKey]:
    """Return the devices that bring in offloaded layers: `mps`, or the first accelerator and the cpu."""
    if "mps" in devices:
        return ["mps"]
    return [*[device for device in devices if isinstance(device, int)][:1], "cpu"]
