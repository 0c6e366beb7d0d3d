"""The device that offloaded models of transformers and diffusers name as theirs: where they run, not `meta`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from bigload.runtime.hooks.hooks import hooks_of


def name_execution_device(model: nn.Module) -> None:
    """Have the property `device` of classes in `model` give the device where an offloaded module runs.

    Libraries define it as the device of the first parameter, and put inputs there. The property is replaced in the
    class that defines it, once for the process: an instance cannot have one. Only for modules that hooks offload is
    the answer another.
    """
    for kind in {type(module) for module in model.modules()}:
        owner: Any = next((each for each in kind.__mro__ if "device" in vars(each)), None)
        plain = None if owner is None else vars(owner)["device"]
        if isinstance(plain, property) and not isinstance(plain, _ExecutionDevice):
            owner.device = _ExecutionDevice(plain)


class _ExecutionDevice(property):
    """A property `device`, with the execution device in place of `meta`."""

    def __init__(self, plain: property) -> None:
        super().__init__(plain.fget, plain.fset, plain.fdel, plain.__doc__)

    def __get__(self, module: Any, kind: type | None = None, /) -> Any:
        found = super().__get__(module, kind)
        if isinstance(found, torch.device) and found.type == "meta":
            return next(_execution_devices(module), found)
        return found


def _execution_devices(module: nn.Module) -> Iterator[torch.device]:
    for below in module.modules():
        for hook in hooks_of(below):
            device = getattr(hook, "execution_device", None)
            if getattr(hook, "offload", False) and device is not None:
                yield torch.empty(0, device=device).device
