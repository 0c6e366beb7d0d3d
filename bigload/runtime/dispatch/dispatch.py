"""Spread a model over devices, RAM and disk: each part runs where its device map says, whatever it is called with.

Names and signatures are those of `accelerate.big_modeling` 1.15.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from bigload.errors import OptionError
from bigload.layouts.formats.dat import Entry
from bigload.runtime.device_map.blocks import (
    DeviceMap,
    device_name,
    resolved_device,
    runs_on,
)
from bigload.runtime.device_map.checks import check_device_map, check_devices_present
from bigload.runtime.device_map.tied_parameters import find_tied_parameters, move_tied
from bigload.runtime.dispatch.dispatched_model import Weights, finish_dispatch, note_device_map, tied_addresses
from bigload.runtime.dispatch.resolved_device_map import (
    USING_WEIGHTS_OF_CHILDREN,
    DispatchOptions,
    ResolvedDeviceMap,
    is_in_blocks,
)
from bigload.runtime.dispatch.supplied_weights import check_supplied, with_tied_names
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.attach_hooks import attach_align_device_hook
from bigload.runtime.hooks.cpu_offload_hooks import CpuOffload, UserCpuOffloadHook
from bigload.runtime.hooks.hooks import add_hook_to_module
from bigload.runtime.modules.module_tensors import DeviceLike
from bigload.runtime.modules.packed_tensors import settle_all, unpacked_state
from bigload.runtime.modules.passing_forward import ready_layers
from bigload.runtime.modules.quantised_layers import check_computable
from bigload.runtime.modules.tensor_slots import refuse_compiled
from bigload.runtime.offload.offload_functions import offloaded
from bigload.runtime.offload.offload_writer import StrPath
from bigload.runtime.offload.offloaded_weights_loader import OffloadedWeightsLoader
from bigload.runtime.offload.weight_sources import LayeredWeights
from bigload.runtime.streaming.streaming_limits import StreamOptions


def dispatch_model(
    model: nn.Module,
    device_map: DeviceMap,
    main_device: DeviceLike | None = None,
    state_dict: Weights | None = None,
    offload_dir: StrPath | None = None,
    offload_index: Mapping[str, Entry] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    *,
    prefetch: bool = True,
    prefetch_bytes: int | str | None = None,
    resident_bytes: int | str | None = None,
    experts_on_demand: bool | StrPath = True,
) -> nn.Module:
    """Put every part of `model` on its device in `device_map`, and return the model, which then takes any input.

    What is on `cpu` or `disk` is brought to the main device for each forward, unless that is the CPU itself: then `cpu`
    is where it stays. Tensors that the model itself owns stay on the main device. Tied weights stay tied, with one copy
    on each device that runs them. A model with one device, other than the disk, is moved there and gets no hooks.

    Args:
        model: With values, or on the meta device where `state_dict` or the disk have them.
        device_map: Module or tensor to device; a number is an accelerator of this machine's kind. Kept as
            `model.hf_device_map`.
        main_device: Where offloaded parts run: by default the first accelerator of the map, else the CPU.
        state_dict: Values of what is on `cpu`, by name; the model's own when left out.
        offload_dir: The folder of what is on `disk`. Values that the model has are written there unless they are there
            already, whatever else it holds.
        offload_index: Where each weight is on disk, as the `index.json` of such a folder says it; nothing is written.
        offload_buffers: Whether buffers of offloaded modules are offloaded too.
        skip_keys: See `AlignDevicesHook`.
        preload_module_classes: See `attach_align_device_hook`.
        force_hooks: Attach hooks for a single device as well.
        prefetch: Bring offloaded weights block by block, the next ones while one computes. Without, each module loads
            its own when it runs.
        prefetch_bytes: The most of weights that are there, or on their way, before their block runs, in bytes or as
            text (`2GiB`). By default twice the largest block.
        resident_bytes: The most of offloaded weights that stay once they are there. By default, on the CPU, pages of
            files stay if all of them fit into the memory that is free, else as many experts as do; nothing does on
            other devices.
        experts_on_demand: Load the experts that the router has chosen, where a module of transformers holds those of a
            layer in the same parameters; they are computed with as by transformers' `eager`. Without, and where that
            cannot be (llama4, dbrx), all experts of a layer come with it. The path of a file that `run --experts`
            wrote has the experts that were used most then stay from the beginning.

    Raises:
        ValueError: the map does not cover the model, or no such size.
        AbsentWeightError: a tensor is on the meta device, and neither what was given nor the folder has its value.
        OptionError: something goes to disk, and neither `offload_dir` nor `offload_index` is given.
        WriteError: the system refused to write.
    """
    options = DispatchOptions(
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        streaming=StreamOptions.of(prefetch, prefetch_bytes, resident_bytes, experts_on_demand, model),
    )
    settle_all(model)
    check_device_map(model, device_map)
    check_devices_present(device_map)
    check_computable(model, partial(runs_on, device_map=device_map, main_device=main_device))
    on_disk = [name for name, device in device_map.items() if device == "disk"]
    if on_disk and offload_dir is None and offload_index is None:
        raise no_offload_folder("offload_dir", on_disk, reason="their weights have no place")

    def offloaded_weights(resolved: ResolvedDeviceMap) -> Weights:
        in_ram = resolved.in_ram(model) if state_dict is None else state_dict
        if offload_dir is not None and on_disk and offload_index is None:
            return offloaded(offload_dir, resolved.on_disk(model), in_ram)
        folder = offload_dir if on_disk else None
        return OffloadedWeightsLoader(state_dict=in_ram, save_folder=folder, index=offload_index)

    return _dispatch(model, device_map, options, offloaded_weights, main_device)


def dispatch_loaded(model: nn.Module, device_map: DeviceMap, stored: Weights, options: DispatchOptions) -> nn.Module:
    """Dispatch a model of which all is where `device_map` has it, and what is on disk is in `stored`, by name."""
    return _dispatch(
        model,
        device_map,
        options,
        lambda resolved: LayeredWeights(resolved.in_ram(model, stored), stored),  # type: ignore[arg-type]  # read only
    )


def _dispatch(
    model: nn.Module,
    device_map: DeviceMap,
    options: DispatchOptions,
    offloaded_weights: Callable[[ResolvedDeviceMap], Weights],
    main_device: DeviceLike | None = None,
) -> nn.Module:
    places = {device_name(device) for device in device_map.values()}
    if len(places) > 1 or "disk" in places or options.force_hooks:
        resolved = ResolvedDeviceMap.of(model, device_map, main_device)
        blocks = resolved.offloaded_blocks()
        ready_layers(model, lambda name: is_in_blocks(f"{name}.weight", blocks))
        resolved.attach(model, offloaded_weights(resolved), options)
    else:
        check_supplied(model, {})
        ready_layers(model, lambda _: False)
        move_tied(model, next(iter(device_map.values()), "cpu"))  # what no checkpoint has comes along
        note_device_map(model, device_map)
    return model


def no_offload_folder(argument: str, modules: Sequence[str], *, reason: str) -> OptionError:
    """Return the error for `modules` that go to disk while `argument` does not say where."""
    return OptionError(
        f"the device map has modules on disk, and no {argument} is given: {reason}",
        details=[name or "(the whole model)" for name in modules],
        hint=f"give a folder with room for their weights as {argument}; nothing was loaded or moved",
    )


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Weights | None = None,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch: bool = True,
    prefetch_bytes: int | str | None = None,
    resident_bytes: int | str | None = None,
    experts_on_demand: bool | StrPath = True,
) -> nn.Module:
    """Keep the weights of `model` on the CPU, bring those of each module in when it runs, and return the model.

    Args:
        model: With values, or on the meta device where `state_dict` has them.
        execution_device: Where it runs; by default where its first parameter is.
        state_dict: Its values by name; its own when left out, not copied if they are on the CPU.

    `offload_buffers`, `preload_module_classes`, `prefetch`, `prefetch_bytes`, `resident_bytes`
    and `experts_on_demand` are those of `dispatch_model`.

    Raises:
        ValueError: no such size.
    """
    options = DispatchOptions(
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        streaming=StreamOptions.of(prefetch, prefetch_bytes, resident_bytes, experts_on_demand, model),
    )

    def in_ram() -> Weights:
        if state_dict is not None:
            return OffloadedWeightsLoader(state_dict=state_dict)
        own = {name: tensor.to("cpu") for name, tensor in unpacked_state(model).items() if not tensor.is_meta}
        return OffloadedWeightsLoader(state_dict=own)

    return _offload_all(model, "cpu", in_ram, execution_device, options)


def disk_offload(
    model: nn.Module,
    offload_dir: StrPath,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
    *,
    prefetch: bool = True,
    prefetch_bytes: int | str | None = None,
    resident_bytes: int | str | None = None,
    experts_on_demand: bool | StrPath = True,
) -> nn.Module:
    """Keep the weights of `model` in the folder `offload_dir`, as `cpu_offload` does on the CPU, and return the model.

    Args:
        model: With values, or on the meta device where the folder has them.
        offload_dir: The folder. What it holds already, by name and digest, is not written again.
        execution_device: Where the model runs; by default where its first parameter is.

    `offload_buffers`, `preload_module_classes`, `prefetch`, `prefetch_bytes`, `resident_bytes`
    and `experts_on_demand` are those of `dispatch_model`.

    Raises:
        ValueError: no such size.
        AbsentWeightError: a weight has no values, and the folder does not hold it either.
        WriteError: the system refused to write.
    """
    options = DispatchOptions(
        offload_buffers=offload_buffers,
        preload_module_classes=preload_module_classes,
        streaming=StreamOptions.of(prefetch, prefetch_bytes, resident_bytes, experts_on_demand, model),
    )
    return _offload_all(model, "disk", lambda: offloaded(offload_dir, unpacked_state(model)), execution_device, options)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep `model` on the CPU until it runs; then it goes to `execution_device` as a whole and stays.

    Args:
        model: With values.
        execution_device: By default the first accelerator, or the CPU without one.
        prev_module_hook: What this function returned for another model, which goes back when this one runs.

    Returns:
        The model, and a hook: its `offload()` sends the model back, its `remove()` ends it all.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _offload_all(
    model: nn.Module,
    place: str,
    offloaded_weights: Callable[[], Weights],
    execution_device: DeviceLike | None,
    options: DispatchOptions,
) -> nn.Module:
    refuse_compiled(model)
    settle_all(model)
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    device = next(devices, "cpu") if execution_device is None else execution_device
    check_devices_present({"": device})
    check_computable(model, lambda _: resolved_device(device))
    tied = find_tied_parameters(model)
    weights = with_tied_names(offloaded_weights(), tied)
    check_supplied(model, weights)
    ready_layers(model, lambda _: True)
    tied_params_map = tied_addresses(model, tied)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model,
        execution_device=device,
        offload=True,
        weights_map=weights,
        offload_buffers=options.offload_buffers,
        preload_module_classes=[*USING_WEIGHTS_OF_CHILDREN, *(options.preload_module_classes or ())],
        tied_params_map=tied_params_map,
    )
    finish_dispatch(
        model, tied, {name: resolved_device(device) for group in tied for name in group}, {"": place}, options.streaming
    )
    return model
