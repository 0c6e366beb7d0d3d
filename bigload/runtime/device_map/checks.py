"""Device maps as dicts: whether one covers a model and fits this machine, and the shortest form of one.

A device map gives modules, and tensors that a split module owns itself, a device each. The device of a module
holds for everything inside that has no key. Names and signatures are those of `accelerate.utils.modeling` 1.15.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import TypeVar

import torch
from torch import nn

from bigload.errors import DeviceMapError, abridged
from bigload.loading.staging.accelerators import device_count
from bigload.runtime.device_map.blocks import DeviceMap, is_covered
from bigload.runtime.modules.module_names import prefixes
from bigload.runtime.modules.module_tensors import DeviceLike
from bigload.units import counted

DeviceT = TypeVar("DeviceT", bound=DeviceLike)


def check_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Check that `device_map` has a device for everything in the state dict of `model`.

    Keys that name nothing in the model, a typo for example, get a `UserWarning`.

    Raises:
        DeviceMapError: something has no device.
    """
    entries = dict.fromkeys(model.state_dict())
    unknown = [name for name in device_map if name not in entries and not _exists(model, name)]
    if unknown:
        text = f"The following device_map keys do not match any submodules in the model: {unknown}"
        warnings.warn(text, UserWarning, stacklevel=2)
    missing = [name for name in entries if not is_covered(name, device_map)]
    if missing:
        raise DeviceMapError(
            "The device_map provided does not give any device for the following parameters: "
            + ", ".join(abridged(missing)),
            missing,
            hint='give a device for "" to cover all that no other key does; a plan covers models with the names of the '
            "checkpoint that it was made for",
        )


def _exists(model: nn.Module, name: str) -> bool:
    """Return whether `name` is a module, a parameter or a buffer of `model`; `""` is the model."""
    module: nn.Module | None = model
    *around, last = name.split(".")
    for key in around:
        module = module._modules.get(key) if module is not None else None
    if module is None:
        return False
    kinds = (module._modules, module._parameters, module._buffers)
    return not name or any(found.get(last) is not None for found in kinds)


def clean_device_map(device_map: dict[str, DeviceT], module_name: str = "") -> dict[str, DeviceT]:
    """Shorten `device_map` in place and return it: siblings on one device become their parent, all of a model `""`.

    With `module_name` only what lies inside that module is shortened. A single key is left as it is, and so is a
    parent with a device of its own that differs. What is put together takes the place of its first key.

    >>> clean_device_map({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": "cpu", "c.z": 1})
    {'a': 0, 'b.x': 1, 'b.y': 'cpu', 'c.z': 1}
    """
    inside = {name: _from(module_name, name) for name in device_map}
    places: dict[str, set[DeviceT]] = {}
    num_keys: Counter[str] = Counter()
    for name, around in inside.items():
        for prefix in around:
            places.setdefault(prefix, set()).add(device_map[name])
            num_keys[prefix] += 1
    cleaned = {
        next((prefix for prefix in around if num_keys[prefix] > 1 and len(places[prefix]) == 1), name): device_map[name]
        for name, around in inside.items()
    }
    device_map.clear()
    device_map.update(cleaned)
    return device_map


def _from(module_name: str, name: str) -> list[str]:
    """Return the modules around `name` from `module_name` on, and `name` itself; none if it lies elsewhere."""
    return [prefix for prefix in prefixes(name) if f"{prefix}.".startswith(f"{module_name}.") or not module_name]


def check_devices_present(device_map: DeviceMap) -> None:
    """Check that torch can use every device of `device_map`, a plan's for example."""
    for device in dict.fromkeys(device_map.values()):
        if device == "disk":
            continue
        try:
            found = torch.device(device)
        except RuntimeError as error:
            if not isinstance(device, int):  # no device at all, which torch says
                raise
            raise _missing(device, device_map, "it sees no accelerator") from error
        if found.type in ("cpu", "meta"):
            continue
        count = device_count(found)
        if (found.index or 0) >= count:
            raise _missing(device, device_map, f"it sees {count or 'none'} of kind {found.type}")


def _missing(device: DeviceLike, device_map: DeviceMap, reason: str) -> DeviceMapError:
    modules = [name for name, each in device_map.items() if each == device]
    name = f"accelerator {device}" if str(device).isdigit() else str(device)
    return DeviceMapError(
        f"{counted(len(modules), 'module')} of the device map cannot go to {name}: torch cannot use it, {reason}",
        modules,
        details=[module or "the whole model" for module in modules],
        hint="plan for the devices of this machine (bigload plan -m auto; bigload.plan(..., 'auto') in Python), "
        "or run on the machine that the plan is for",
    )
