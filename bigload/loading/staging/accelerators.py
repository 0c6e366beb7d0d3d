"""Accelerators as torch reports them: presence, free memory, allocation."""

from __future__ import annotations

import torch

from bigload.errors import NotEnoughMemoryError, OptionError


def check_present(name: str) -> None:
    """Raise before anything is read if torch cannot use the device `name`."""
    device = torch.device(name)
    if device.type == "cpu":
        return
    count = device_count(device)
    if (device.index or 0) >= count:
        found = f"{count} of them" if count else "none"
        raise OptionError.of("device", name, f"a device that torch can use: it sees {found} of kind {device.type}")


def device_count(device: torch.device) -> int:
    """Return how many devices of the kind of `device` torch can use."""
    try:
        module = torch.get_device_module(device)
        return int(module.device_count()) if module.is_available() else 0
    except (RuntimeError, AttributeError):  # this torch was built without the kind, or it is meta, which holds no bytes
        return 0


def free_bytes(name: str) -> int | None:
    """Return the bytes that this process could still allocate on the device `name`; `None` if unknown.

    What torch has reserved and not lent counts as free, though it may lie in pieces.
    """
    device = torch.device(name)
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    try:
        free, _ = module.mem_get_info(device)
    except RuntimeError:  # some drivers of xpu do not tell
        return None
    if hasattr(module, "memory_reserved"):
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return int(free)


def take_memory(device: str, num_bytes: int) -> torch.Tensor:
    """Return `num_bytes` of memory of `device`, unset."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    except (torch.OutOfMemoryError, MemoryError) as error:
        available, hint = (
            free_bytes(device) or 0,
            "its memory may be in pieces; empty torch's cache, or load a smaller part",
        )
        raise NotEnoughMemoryError(
            f"a tensor on {device}", needed_bytes=num_bytes, available_bytes=available, hint=hint
        ) from error
