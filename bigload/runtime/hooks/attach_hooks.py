"""Attach `AlignDevicesHook`s to the modules of a model, as a device map or one device says.

Names and signatures are those of `accelerate.hooks` 1.15.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from typing import TypeVar

from torch import Tensor, nn

from bigload.runtime.hooks.align_devices import AlignDevicesHook, TiedParams
from bigload.runtime.hooks.hooks import add_hook_to_module
from bigload.runtime.hooks.send_to_device import DeviceLike
from bigload.runtime.modules.module_names import joined
from bigload.runtime.modules.tensor_slots import called_modules, has_no_forward, shared_tensors
from bigload.runtime.offload.weight_sources import PrefixedDataset

ValueT = TypeVar("ValueT")


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Container[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Let `module` and all below that have weights, and no hook yet, run on `execution_device`.

    What comes with a module around it gets no hook, see `attach_align_device_hook`.

    Args:
        module: Where to begin.
        execution_device: A number is an accelerator of this machine's kind.
        preload_module_classes: Classes of modules; what is inside of them gets no hook.

    `skip_keys` and `tied_params_map` are those of `AlignDevicesHook`.
    """

    def attach(module: nn.Module) -> None:
        own = shared_tensors(module, recurse=False)
        is_brought = has_no_forward(module) and all(slots[0].tensor.is_meta for slots in own)  # there may be none
        if not hasattr(module, "_hf_hook") and _has_state(module) and not is_brought:
            hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
            add_hook_to_module(module, hook)
        if type(module).__name__ not in (preload_module_classes or ()):
            for child in module.children():
                attach(child)

    attach(module)


def _has_state(module: nn.Module) -> bool:
    """Return whether the state dict of `module` has tensors, without making it."""
    return any(
        True
        for owner in module.modules()
        for key, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and key not in owner._non_persistent_buffers_set
    )


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Container[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Give an `AlignDevicesHook` to every module, from `module` on down, that owns tensors itself.

    Tensors of modules that are never called because they have no forward, such as lists of parameters, are offloaded
    along with those of the module around.

    Args:
        module: Where to begin.
        weights_map: Values by their names in the model, of which `module_name` is the beginning.
        module_name: The name of `module` in the model.
        preload_module_classes: Classes whose modules, if offloaded, load everything below at once: for those that use
            weights of modules in them without calling these.

    `execution_device`, `offload`, `offload_buffers`, `skip_keys` and `tied_params_map` are those of
    `AlignDevicesHook`.
    """

    def attach(module: nn.Module, name: str) -> None:
        is_preloaded = offload and type(module).__name__ in (preload_module_classes or ())
        if is_preloaded or shared_tensors(module, recurse=False, uncalled=offload):
            prefix = f"{name}." if name else ""
            hook = AlignDevicesHook(
                execution_device=execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
                offload_buffers=offload_buffers,
                place_submodules=is_preloaded,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            hook._loads_uncalled = offload
            add_hook_to_module(module, hook, append=True)
        if not is_preloaded:
            for key, child in called_modules(module) if offload else module.named_children():
                attach(child, joined(name, key))

    attach(module, module_name)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Container[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Give hooks to a model whose blocks run on different devices, or are offloaded or not.

    A block that is not offloaded is placed as a whole. The model itself, where its name is `""`, returns outputs to the
    device that its arguments came from.

    Args:
        module: The model.
        execution_device: Where blocks run, by their names in the model, or one device for all.
        offload: Whether they are offloaded, likewise. Blocks are the names that are in both.

    `weights_map`, `offload_buffers`, `module_name`, `skip_keys`, `preload_module_classes` and `tied_params_map` are
    those of `attach_align_device_hook`.
    """
    make_hook = partial(
        AlignDevicesHook, offload_buffers=offload_buffers, skip_keys=skip_keys, tied_params_map=tied_params_map
    )
    offload_all = partial(
        attach_align_device_hook,
        offload=True,
        weights_map=weights_map,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        tied_params_map=tied_params_map,
    )
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            offload_all(module, execution_device=execution_device, module_name=module_name)
        else:
            add_hook_to_module(module, make_hook(execution_device, io_same_device=True, place_submodules=True))
        return
    devices: Mapping[str, DeviceLike | None] = _by_block(execution_device, offload)
    offloads = _by_block(offload, devices)

    def attach(module: nn.Module, name: str) -> None:
        is_root, device = not name, devices.get(name)
        if name in devices and name in offloads:
            is_offloaded = offloads[name]
            if is_offloaded:
                offload_all(module, execution_device=device, module_name=name)
            if not is_offloaded or not hasattr(module, "_hf_hook"):
                hook = make_hook(device, io_same_device=is_root, place_submodules=not is_offloaded)
                add_hook_to_module(module, hook)
            if device is not None:
                preload = preload_module_classes if is_offloaded else None
                attach_execution_device_hook(module, device, skip_keys, preload, tied_params_map)
        elif is_root:
            add_hook_to_module(module, make_hook(device, io_same_device=True))
        for key, child in module.named_children():
            attach(child, joined(name, key))

    attach(module, module_name)


def _by_block(given: ValueT | Mapping[str, ValueT], blocks: object) -> Mapping[str, ValueT]:
    """Return `given`, or with one value for all the names in `blocks` with that value."""
    if isinstance(given, Mapping):
        return given
    assert isinstance(blocks, Mapping), "one of both is a mapping"
    return dict.fromkeys(blocks, given)
