"""Device map of a model, resolved: home and execution device of each block, and the hooks that make it run so."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from bigload.runtime.device_map.blocks import (
    OFFLOADED,
    DeviceMap,
    DeviceMapBlock,
    blocks_of,
    device_name,
    device_of,
    main_device_of,
    resolved_device,
)
from bigload.runtime.device_map.tied_parameters import find_tied_parameters
from bigload.runtime.dispatch.dispatched_model import Weights, finish_dispatch, tied_addresses
from bigload.runtime.dispatch.supplied_weights import check_supplied, with_tied_names
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.attach_hooks import attach_align_device_hook_on_blocks
from bigload.runtime.hooks.hooks import add_hook_to_module
from bigload.runtime.modules.module_names import prefixes
from bigload.runtime.modules.module_tensors import DeviceLike, set_module_tensor_to_device
from bigload.runtime.modules.packed_tensors import unpacked_state
from bigload.runtime.modules.tensor_slots import refuse_compiled
from bigload.runtime.offload.weight_sources import PrefixedDataset
from bigload.runtime.streaming.streaming_limits import StreamOptions

USING_WEIGHTS_OF_CHILDREN = ("MultiheadAttention",)
"""Classes of torch whose forward takes weights of modules inside without calling these."""


class DispatchOptions(NamedTuple):
    """Options of a dispatch, whatever the device map; see `dispatch_model`.

    Attributes:
        streaming: Bounds on the memory of streamed weights; `None` if each module loads its own when it runs.
    """

    offload_buffers: bool = False
    skip_keys: str | list[str] | None = None
    preload_module_classes: Sequence[str] | None = None
    force_hooks: bool = False
    streaming: StreamOptions | None = None


class ResolvedDeviceMap(NamedTuple):
    """Home and execution device of each part of a model.

    Attributes:
        main_device: Where offloaded parts run.
    """

    device_map: DeviceMap
    main_device: DeviceLike
    blocks: tuple[DeviceMapBlock, ...]
    tied: Sequence[Sequence[str]]

    @classmethod
    def of(cls, model: nn.Module, device_map: DeviceMap, main_device: DeviceLike | None) -> ResolvedDeviceMap:
        """Return how `device_map` spreads `model`, whose parameters are still tied."""
        refuse_compiled(model)
        return cls(
            device_map=device_map,
            main_device=main_device_of(device_map) if main_device is None else main_device,
            blocks=blocks_of(model, device_map),
            tied=find_tied_parameters(model),
        )

    def in_ram(self, model: nn.Module, stored: Container[str] | None = None) -> dict[str, torch.Tensor]:
        """Return what hooks bring in from RAM, on the CPU: what is there already is not copied.

        Where `stored` says what is on disk, that is all else: a weight for the disk may be tied to one that is not.
        """
        offloaded = self.offloaded_blocks()
        return {
            name: tensor.detach().to("cpu")
            for name, tensor in unpacked_state(model).items()
            if not tensor.is_meta
            and is_in_blocks(name, offloaded)
            and (device_of(name, self.device_map) != "disk" if stored is None else name not in stored)
        }

    def on_disk(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return what lives on disk, as the model has it."""
        return {
            name: tensor for name, tensor in unpacked_state(model).items() if device_of(name, self.device_map) == "disk"
        }

    def attach(self, model: nn.Module, weights: Weights, options: DispatchOptions) -> None:
        """Give `model` the hooks that make it run so, with `weights` the values of what is offloaded."""
        weights = with_tied_names(weights, self.tied)
        offloaded = self.offloaded_blocks()
        check_supplied(model, weights, lambda name: "." not in name or is_in_blocks(name, offloaded))
        main, whole = self.main_device, [block for block in self.blocks if block.is_whole]
        tied_params_map = tied_addresses(model, self.tied)
        runs_on = {name: resolved_device(self._runs_on(name)) for group in self.tied for name in group}
        _bring_own_tensors(model, main, weights)
        attach_align_device_hook_on_blocks(
            model,
            execution_device={"": main, **{block.name: block.runs_on(main) for block in whole}},
            offload={block.name: block.is_offloaded(main) for block in whole},
            weights_map=weights,
            offload_buffers=options.offload_buffers,
            skip_keys=options.skip_keys,
            preload_module_classes=[*USING_WEIGHTS_OF_CHILDREN, *(options.preload_module_classes or ())],
            tied_params_map=tied_params_map,
        )
        for block in self.blocks:
            if block.name and not block.is_whole and not _owns_scalars_only(model.get_submodule(block.name)):
                hook = AlignDevicesHook(
                    execution_device=block.runs_on(main),
                    offload=block.is_offloaded(main),
                    weights_map=PrefixedDataset(weights, f"{block.name}."),
                    offload_buffers=options.offload_buffers,
                    skip_keys=options.skip_keys,
                    tied_params_map=tied_params_map,
                )
                add_hook_to_module(model.get_submodule(block.name), hook, append=True)
        if isinstance(model._hf_hook, AlignDevicesHook):
            model._hf_hook.io_same_device = True
        finish_dispatch(model, self.tied, runs_on, self.device_map, options.streaming)

    def offloaded_blocks(self) -> dict[str, bool]:
        """Return the names of blocks that are brought in for each forward, with whether they are whole."""
        return {block.name: block.is_whole for block in self.blocks if block.is_offloaded(self.main_device)}

    def _runs_on(self, name: str) -> DeviceLike:
        device = device_of(name, self.device_map)
        return self.main_device if device_name(device) in OFFLOADED else device


def _bring_own_tensors(model: nn.Module, device: DeviceLike, weights: Weights) -> None:
    """Give tensors that the model owns itself the values that only `weights` have: they are never offloaded."""
    for key in (*model._parameters, *model._buffers):
        tensor = model._parameters.get(key, model._buffers.get(key))
        if tensor is not None and tensor.is_meta and key in weights:
            set_module_tensor_to_device(model, key, device, value=weights[key])


def _owns_scalars_only(module: nn.Module) -> bool:
    """Return whether what `module` owns itself are scalars in RAM, which torch computes with on any device."""
    own = (*module._parameters.values(), *module._buffers.values())
    return all(tensor.dim() == 0 and tensor.device.type == "cpu" for tensor in own if tensor is not None)


def is_in_blocks(name: str, blocks: Mapping[str, bool]) -> bool:
    """Return whether the tensor `name` belongs to one of `blocks`, given with whether they are whole."""
    *around, owner, _ = prefixes(name)
    return owner in blocks or any(blocks.get(module) for module in around)
