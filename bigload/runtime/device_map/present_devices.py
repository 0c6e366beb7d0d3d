"""Check that this machine has the devices of a device map, before anything is loaded or moved."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bigload.errors import DeviceNotPresentError
from bigload.runtime.device_map.blocks import DeviceLike


def check_devices_present(device_map: Mapping[str, DeviceLike]) -> None:
    """Check that torch can use every device of `device_map`, a plan's for example.

    Raises:
        DeviceNotPresentError: it cannot use one of them.
    """
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
        count = _num_devices(found)
        if (found.index or 0) >= count:
            raise _missing(device, device_map, f"it sees {count or 'none'} of kind {found.type}")


def _num_devices(device: torch.device) -> int:
    try:
        module = torch.get_device_module(device)
        return int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):  # this torch was built without that kind
        return 0


def _missing(device: DeviceLike, device_map: Mapping[str, DeviceLike], reason: str) -> DeviceNotPresentError:
    return DeviceNotPresentError(str(device), [name for name, each in device_map.items() if each == device], reason)
