"""Device map of a plan for a model: the plan's own keys, or those of a model that names tensors in another way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from bigload.conversion.checkpoint_view import CheckpointView
from bigload.devices import Device
from bigload.errors import DeviceMapError
from bigload.loading.selection import planned_device
from bigload.planning.plan import Plan
from bigload.runtime.device_map.tied_parameters import find_tied_parameters
from bigload.runtime.modules.module_names import joined, prefixes
from bigload.runtime.modules.module_tensors import DeviceLike
from bigload.units import counted


def planned_map(model: nn.Module, plan: Plan, view: CheckpointView | None) -> dict[str, DeviceLike]:
    """Return the devices that `plan` has for modules of `model`, by their names in `view`.

    Without a `view` they are those of the checkpoint. Names of tied tensors that are not stored get the device of one
    that is. Where the model has other names than the checkpoint, each tensor has the device of the stored ones that it
    is made of, and modules whose tensors agree are one key; a module without stored tensors goes with the first that
    has some in the module around it.
    """
    if view is None or all(view.sources(name) == (name,) for name in view.tensors):
        return _with_ties(model, replace(plan, renamed=None).device_map)
    homes, problems = dict[str, Device](), list[DeviceMapError]()
    for name in view.tensors:
        try:
            device = planned_device(view, name, plan)
        except DeviceMapError as error:
            problems.append(error)
        else:
            homes |= {} if device is None else {name: device}
    if problems:
        raise DeviceMapError(
            f"the plan has parts of {counted(len(problems), 'tensor')} of {type(model).__name__} on several devices",
            [name for error in problems for name in error.names],
            details=[error.message for error in problems],
            hint=problems[0].hint or "",
        )
    devices: dict[str, DeviceLike] = {**replace(plan, homes=homes, renamed=None).device_map}
    for group in find_tied_parameters(model):
        found = next((devices[name] for name in group if name in devices), None)
        devices |= {} if found is None else {name: found for name in group if name not in devices}
    below: dict[str, dict[DeviceLike, None]] = {}
    for name in model.state_dict():
        if name in devices:
            for prefix in prefixes(name):
                below.setdefault(prefix, {})[devices[name]] = None
    return dict(_keys(model, "", below, None))


def _keys(
    module: nn.Module, name: str, below: Mapping[str, Mapping[DeviceLike, None]], around: DeviceLike | None
) -> Iterator[tuple[str, DeviceLike]]:
    """Yield keys for what is in `module`; `below` has the devices of stored tensors by what they are below of."""
    found = below.get(name, {})
    device = next(iter(found), around)
    if device is None:
        return
    if len(found) <= 1:
        yield name, device
        return
    for key in (*module._parameters, *module._buffers):
        tensor = joined(name, key)
        yield tensor, next(iter(below.get(tensor, {})), device)
    for key, child in module.named_children():
        yield from _keys(child, joined(name, key), below, device)


def _with_ties(model: nn.Module, device_map: Mapping[str, DeviceLike]) -> dict[str, DeviceLike]:
    """Return `device_map` with devices for tied names that are not in the checkpoint: those of the stored ones."""
    placed = dict(device_map)
    for group in find_tied_parameters(model):
        known = {name: [prefix for prefix in prefixes(name) if prefix in placed] for name in group}
        device = next((placed[found[-1]] for found in known.values() if found), None)
        if device is not None:
            placed.update((name.rpartition(".")[0], device) for name, found in known.items() if not found)
    return placed
