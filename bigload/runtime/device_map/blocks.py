"""The blocks of a device map: which modules are placed or offloaded as a whole, and which tensors stand between them.

A device map may name a module and, with another device, something inside of it. Its blocks never lie in each other:
what a map says of a module that has other keys inside holds for the blocks and tensors below that have none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from bigload.runtime.modules.module_names import joined, prefixes
from bigload.runtime.modules.module_tensors import DeviceLike

DeviceMap = Mapping[str, DeviceLike]
"""Modules, and tensors by name, to devices: numbers of accelerators, `"cpu"`, `"disk"` or what torch calls them."""

OFFLOADED = ("cpu", "disk")


class DeviceMapBlock(NamedTuple):
    """A part of a model that gets one hook, or one for each of its modules.

    Attributes:
        name: The module's name in the model; `""` is the model.
        devices: Where its tensors live: one device for all of a whole block, those of each tensor otherwise.
        is_whole: Whether all modules inside belong to it. If not, it is the tensors that a split module owns itself.
    """

    name: str
    devices: tuple[DeviceLike, ...]
    is_whole: bool = True

    def is_offloaded(self, main_device: DeviceLike) -> bool:
        """Return whether any tensor of it is brought in for each forward, if offloaded ones run on `main_device`.

        Tensors that the model owns itself never are: all of a forward would be their stay.
        """
        away = ("disk",) if device_type(main_device) in ("cpu", "mps") else OFFLOADED
        return any(device_name(device) in away for device in self.devices) and (self.is_whole or bool(self.name))

    def runs_on(self, main_device: DeviceLike) -> DeviceLike:
        return next((device for device in self.devices if device_name(device) not in OFFLOADED), main_device)


def device_name(device: DeviceLike) -> str:
    """Return a device as text: `cpu` and `disk` are always these."""
    return "cpu" if device != "disk" and device_type(device) == "cpu" else str(device)


def device_type(device: DeviceLike) -> str:
    """Return the kind of a device that is not the disk; a number is an accelerator of this machine's kind."""
    return torch.device(device).type


def resolved_device(device: DeviceLike) -> torch.device:
    """Return `device` as its tensors have it: with the number of the current one if it has none."""
    found = torch.device(device)
    is_whole = found.index is not None or found.type in {"cpu", "meta"} or not torch.accelerator.is_available()
    return found if is_whole else torch.device(found.type, torch.accelerator.current_device_index())


def main_device_of(device_map: DeviceMap) -> DeviceLike:
    """Return where offloaded modules run: the first device of the map that is an accelerator, else the CPU."""
    return next((device for device in device_map.values() if device_name(device) not in OFFLOADED), "cpu")


def runs_on(name: str, device_map: DeviceMap, main_device: DeviceLike | None = None) -> torch.device:
    """Return the device that runs the module `name`: what is offloaded runs on the main one."""
    device = device_of(f"{name}.", device_map) if is_covered(f"{name}.", device_map) else "cpu"
    main = main_device_of(device_map) if main_device is None else main_device
    return resolved_device(main if device_name(device) in OFFLOADED else device)


def is_covered(name: str, device_map: DeviceMap) -> bool:
    """Return whether the map has a device for the tensor `name`."""
    return any(prefix in device_map for prefix in prefixes(name))


def device_of(name: str, device_map: DeviceMap) -> DeviceLike:
    """Return the device of the innermost module around the tensor `name` that the map has.

    Raises:
        ValueError: there is none.
    """
    found = [prefix for prefix in prefixes(name) if prefix in device_map]
    if not found:
        raise ValueError(f"The device_map has no device for {name}")
    return device_map[found[-1]]


def blocks_of(model: nn.Module, device_map: DeviceMap) -> tuple[DeviceMapBlock, ...]:
    """Return the blocks of `device_map` in the order of `model`.

    Example: of a map `{"h": 0, "h.1": "cpu"}`, where the module `h` has the children 0, 1 and 2 and a bias, the blocks
    are the bias (`h`, not whole), `h.0`, `h.1` and `h.2`.
    """
    split = {prefix for name in device_map for prefix in prefixes(name) if prefix != name}
    return tuple(_blocks(model, "", None, device_map, split))


def _blocks(
    module: nn.Module, name: str, around: DeviceLike | None, device_map: DeviceMap, split: set[str]
) -> Iterator[DeviceMapBlock]:
    device = device_map.get(name, around)
    if name not in split:
        if device is not None:
            yield DeviceMapBlock(name=name, devices=(device,))
        return
    owned = [
        key for table in (module._parameters, module._buffers) for key, value in table.items() if value is not None
    ]
    places = [device_map.get(joined(name, key), device) for key in owned]
    known = tuple(place for place in places if place is not None)
    if known:
        yield DeviceMapBlock(name=name, devices=known, is_whole=False)
    for key, child in module.named_children():
        yield from _blocks(child, joined(name, key), device, device_map, split)
