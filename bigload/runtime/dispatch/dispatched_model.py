"""Attributes of a dispatched model: parameters tied again, its device map, and hooks that stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from bigload.runtime.device_map.blocks import DeviceMap
from bigload.runtime.hooks.align_devices import AlignDevicesHook, TiedParams
from bigload.runtime.hooks.execution_device import name_execution_device
from bigload.runtime.hooks.hooks import hooks_of
from bigload.runtime.hooks.refusals import refuse_changes
from bigload.runtime.streaming.streaming_limits import StreamOptions

Weights = Mapping[str, torch.Tensor]


def finish_dispatch(
    model: nn.Module,
    tied: Sequence[Sequence[str]],
    runs_on: Mapping[str, torch.device],
    device_map: DeviceMap,
    streaming: StreamOptions | None,
) -> None:
    """Tie parameters of a model that has its hooks, note its map, and have its blocks stream if that is asked for."""
    _tie_on_devices(model, tied, runs_on)
    refuse_changes(model)
    if streaming is not None:
        from bigload.runtime.streaming.streaming_hook import stream  # a model in memory starts without it

        stream(model, streaming)
    note_device_map(model, device_map)


def note_device_map(model: nn.Module, device_map: DeviceMap) -> None:
    """Give `model` the map by which transformers and others see how it is dispatched, and its hooks the same one."""
    name_execution_device(model)
    noted = dict(device_map)
    model.hf_device_map = noted  # type: ignore[assignment]
    for module in model.modules():
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook):
                hook.device_map = noted


def _tie_on_devices(model: nn.Module, tied: Sequence[Sequence[str]], runs_on: Mapping[str, torch.device]) -> None:
    """Make names of each group one parameter again, as far as they are on one device.

    A name that is offloaded becomes the parameter that stays where its module runs, if the group has one there.
    """
    for group in tied:
        slots = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in group}
        there: dict[torch.device, nn.Parameter] = {}
        for owner, key in slots.values():
            parameter = getattr(owner, key)
            there.setdefault(parameter.device, parameter)
        for name, (owner, key) in slots.items():
            parameter = getattr(owner, key)
            wanted = there.get(runs_on[name], there[parameter.device]) if parameter.is_meta else there[parameter.device]
            if wanted is not parameter:
                setattr(owner, key, wanted)


def tied_addresses(model: nn.Module, tied: Sequence[Sequence[str]]) -> TiedParams:
    """Return the map in which the hooks of `model` find tied weights that are on their device already."""
    parameters = (model.get_parameter(group[0]) for group in tied)
    return {parameter.data_ptr(): {} for parameter in parameters if not parameter.is_meta}
