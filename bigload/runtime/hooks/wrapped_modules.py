"""Load the weights of an offloaded module while another one is put around it, as adapters are.

PEFT reads the device of a layer's weight to place what it adds, and some adapters begin with values computed from that
weight. Between forwards both are those of a placeholder. torch calls a hook whenever a module becomes part of another:
from then on its weights are there, until the next one is wrapped or a forward begins.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import MutableMapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from bigload.runtime.device_map.blocks import device_of
from bigload.runtime.hooks.hooks import hooks_of
from bigload.runtime.modules.module_names import joined

DeviceMap = MutableMapping[str, int | str | torch.device]


@runtime_checkable
class HoldsWeights(Protocol):
    """A hook that can load the offloaded weights of its module without a forward."""

    offload: bool
    device: torch.device | None
    device_map: DeviceMap | None

    @property
    def module_name(self) -> str:
        """The name that the module had in the model when it was dispatched."""

    def begin_call(self, module: nn.Module) -> bool:
        """Load the weights for a call; return whether `end_call` has to follow."""

    def end_call(self) -> None:
        """Offload them again."""

    def hold_weights(self, module: nn.Module) -> None:
        """Load the weights."""

    def release_weights(self) -> None:
        """Offload those that were not changed."""


class _HeldHook(threading.local):
    """The hook of the module that this thread wrapped last."""

    hook: weakref.ref[HoldsWeights] | None = None  # which keeps no model alive


_held = _HeldHook()
_watching = threading.Event()


def watch_wrapping() -> None:
    """Notice from now on, in this process, when an offloaded module becomes part of another one."""
    if not _watching.is_set():
        _watching.set()
        register_module_module_registration_hook(_registered)


def end_wrapping() -> None:
    """Offload the weights of the module that this thread wrapped last."""
    if _held.hook is not None:
        hook, _held.hook = _held.hook(), None
        if hook is not None:
            hook.release_weights()


def _registered(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    hook = None if module is None else _offloading(module)
    if module is not None and hook is not None:
        end_wrapping()
        hook.hold_weights(module)
        _held.hook = weakref.ref(hook)
        wrapper.__dict__["_call_impl"] = partial(_call_around, wrapper)
        if hook.device_map is not None and hook.device is not None and hook.module_name:
            # where loaders of adapters put these: around the module, not in it
            place = device_of(hook.module_name, hook.device_map)
            hook.device_map[joined(hook.module_name, name)] = place
            hook.device_map[hook.module_name] = hook.device


def _call_around(wrapper: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call `wrapper` with the weights of the one module that it is around: it may compute with these itself."""
    call = type(wrapper)._call_impl
    inside = [(module, hook) for module in wrapper.children() for hook in [_offloading(module)] if hook is not None]
    if len(inside) != 1:
        return call(wrapper, *args, **kwargs)  # type: ignore[no-untyped-call]
    module, hook = inside[0]
    if hook.device is not None:
        _place_additions(wrapper, hook.device)
    has_begun = hook.begin_call(module)
    try:
        return call(wrapper, *args, **kwargs)  # type: ignore[no-untyped-call]
    finally:
        if has_begun:
            hook.end_call()


def _offloading(module: nn.Module) -> HoldsWeights | None:
    """Return the hook of `module` that offloads its own weights, if it has one."""
    return next((hook for hook in hooks_of(module) if isinstance(hook, HoldsWeights) and hook.offload), None)


def _place_additions(module: nn.Module, device: torch.device) -> None:
    """Have what was added around an offloaded module on its device, as `module.to` puts it there."""
    if "_hf_hook" in module.__dict__:
        return
    own = (*module._parameters.values(), *module._buffers.values())
    if any(tensor is not None and not tensor.is_meta and tensor.device != device for tensor in own):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
    for child in module.children():
        _place_additions(child, device)
