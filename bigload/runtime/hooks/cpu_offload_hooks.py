"""Hooks that move a whole model to a device when it runs, where it stays until it is offloaded.

Names and signatures are those of `accelerate.hooks` 1.15.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from bigload.runtime.device_map.tied_parameters import move_tied
from bigload.runtime.hooks.hooks import ModelHook, remove_hook_from_module
from bigload.runtime.hooks.send_to_device import DeviceLike, send_to_device

_CPU = torch.device("cpu")


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until its first forward; from then on it is on the execution device.

    Args:
        execution_device: Where forward runs. A number is an accelerator of this machine's kind; `None` is its first
            accelerator, or the CPU without one.
        prev_module_hook: Another model, which leaves its device when this one runs.
    """

    def __init__(
        self, execution_device: DeviceLike | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = _default_device() if execution_device is None else execution_device

    def __deepcopy__(self, memo: dict[int, Any]) -> CpuOffload:
        """Return a hook for a copy of the model. The model before is copied only if it is part of the same copy."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        before = self.prev_module_hook
        if before is not None and id(before.model) not in memo:
            memo[id(before)] = before
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def init_hook(self, module: nn.Module) -> nn.Module:
        return move_tied(module, _CPU)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Move the model before away, then `module` and the arguments here. If there is no room, `module` goes back."""
        before = self.prev_module_hook
        if isinstance(before, UserCpuOffloadHook) and not _is_on(before.model, _CPU):
            before.offload()
        device = torch.device(self.execution_device)
        if not _is_on(module, device):
            try:
                move_tied(module, device)
            except BaseException:
                move_tied(module, _CPU)
                raise
        return send_to_device(args, device), send_to_device(kwargs, device)


def _default_device() -> torch.device:
    return torch.device(0) if torch.accelerator.is_available() else _CPU


def _is_on(module: nn.Module, device: torch.device) -> bool:
    return all(tensor.device == device for tensors in (module.parameters(), module.buffers()) for tensor in tensors)


class UserCpuOffloadHook:
    """A model and its hook, in the hands of a user.

    Args:
        model: The model.
        hook: The hook that it has.
    """

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU, until its next forward."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off; the model stays where it is."""
        remove_hook_from_module(self.model)
