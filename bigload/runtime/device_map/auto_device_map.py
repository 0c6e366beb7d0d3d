"""A device map for a model that exists as modules, on the meta device or with memory.

Signature and meaning are those of `accelerate.infer_auto_device_map` 1.15, plus `policy`, which asks bigload's own
planner instead.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from bigload.errors import DoesNotFitError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.model.units import Unit
from bigload.planning.placement.problem import Misfit, PlacementProblem
from bigload.planning.placement.solve import solve
from bigload.runtime.device_map.checks import clean_device_map
from bigload.runtime.device_map.device_memory import DeviceKey, MaxMemoryLike, get_max_memory
from bigload.runtime.device_map.first_fit import FirstFit, TieGroups
from bigload.runtime.device_map.model_units import units_of_model
from bigload.runtime.device_map.module_queue import ModuleQueue, direct_parts
from bigload.runtime.device_map.module_sizes import DTypeLike, Size, class_names, compute_module_sizes
from bigload.runtime.device_map.tied_parameters import check_tied_parameters_in_config, find_tied_parameters
from bigload.units import MAX_SIZE, format_size

_logger = logging.getLogger(__name__)


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemoryLike | None = None,
    no_split_module_classes: Iterable[str] | str | None = None,
    dtype: DTypeLike | None = None,
    special_dtypes: Mapping[str, DTypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    policy: str | None = None,
) -> OrderedDict[str, DeviceKey]:
    """Return a device for every module of `model`: accelerators by number, then `mps`, `cpu` and `disk`.

    Everything in the state dict is covered; where a module is split, tensors that it owns itself are keys too. Tied
    parameters come together on one device, as long as one has room for them.

    Args:
        model: May be on the meta device: names, shapes, dtypes and ties are all that is looked at.
        max_memory: Limits by device, as `get_max_memory` takes them; without, what is free. The disk takes what is left
            over, up to its limit if it has one.
        no_split_module_classes: Classes whose modules stay whole. With a policy and without classes, the model's own
            `_no_split_modules` and the repeated blocks that names show stay whole.
        dtype: What floating-point weights are loaded in, see `compute_module_sizes`.
        special_dtypes: What single tensors are loaded in, by name.
        verbose: Log every step at level INFO.
        clean_result: Put siblings on one device together, as `clean_device_map` does.
        offload_buffers: Whether buffers of offloaded modules are offloaded too. If not and they would fit on no
            accelerator, there is a warning.
        fallback_allocation: Where a device would stay empty, bring the first later module forward that fits on it.
        policy: `None` fills the devices in order, as accelerate does, and keeps room on the first accelerator and on
            the cpu for the largest layer still to come. Else the name of one of bigload's policies, to which `verbose`,
            `offload_buffers` and `fallback_allocation` mean nothing.

    Raises:
        DoesNotFitError: the limits, that on the disk included, leave no room for something.
        OptionError: `max_memory` names an unknown device or a size that cannot be read.
        OptionError: there is no such policy.
    """
    limits = get_max_memory(max_memory)
    ties = find_tied_parameters(model)
    if not ties and check_tied_parameters_in_config(model):
        _logger.warning("The model weights are not tied: call its tie_weights() before a device map is made of it")
    if policy is not None:
        units = units_of_model(model, no_split_module_classes, dtype, special_dtypes)
        device_map = _map_by_policy(policy, units, limits, model_name=type(model).__name__)
    else:
        limits.setdefault("disk", math.inf)
        sizes = compute_module_sizes(model, dtype, special_dtypes)
        work = ModuleQueue(direct_parts(model), sizes, class_names(no_split_module_classes))
        run = FirstFit(work, TieGroups(ties), limits, fallback=fallback_allocation, verbose=verbose)
        device_map = run.place(type(model).__name__)
        if not offload_buffers:
            buffers = compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)
            _warn_of_offloaded_buffers(buffers, device_map, run)
        if run.needed:
            lines = [f"  {device}: {math.ceil(num_bytes)} bytes required" for device, num_bytes in run.needed.items()]
            _logger.info("No module went to these devices, due to insufficient memory:\n%s", "\n".join(lines))
    if clean_result:
        clean_device_map(device_map)
    return device_map


def _warn_of_offloaded_buffers(buffers: Mapping[str, Size], device_map: Mapping[str, DeviceKey], run: FirstFit) -> None:
    """Warn if the buffers of offloaded modules, which stay on an accelerator, would fit on none."""
    num_bytes = sum(buffers.get(name, 0) for name, device in device_map.items() if device in ("cpu", "disk"))
    free = [limit - run.used[device] for device, limit in run.limits.items() if device not in ("cpu", "disk")]
    if num_bytes and free and max(free) < num_bytes:
        text = (
            f"Current model requires {math.ceil(num_bytes)} bytes of buffers for offloaded layers, more than is left "
            "on any accelerator. With offload_buffers=True they are offloaded as well."
        )
        warnings.warn(text, stacklevel=3)


def _map_by_policy(
    policy: str, units: Sequence[Unit], limits: Mapping[DeviceKey, Size], *, model_name: str
) -> OrderedDict[str, DeviceKey]:
    # Policies take whole numbers; no limit is the largest one.
    budget = MemoryBudget.of({str(key): MAX_SIZE if limit == math.inf else int(limit) for key, limit in limits.items()})
    found = solve(PlacementProblem(units=units, budget=budget), policy)
    if isinstance(found, Misfit):
        raise _does_not_fit(model_name, units, budget, found)
    return OrderedDict(
        (part.name, device.kind if device.index is None else device.index)
        for unit, device in zip(units, found.placement.devices, strict=True)
        for part in unit.parts
    )


def _does_not_fit(name: str, units: Sequence[Unit], budget: MemoryBudget, misfit: Misfit) -> DoesNotFitError:
    needed = sum(unit.num_bytes for unit in units)
    limits = {device: limit for device, limit in budget if limit is not None}
    rows = [
        f"{device}: {format_size(limit)}, of which {format_size(misfit.workspace.get(device, 0))} for what is streamed"
        for device, limit in limits.items()
    ]
    shortfalls = {str(device): lacking for device, lacking in misfit.too_small.items()}
    if misfit.unplaced_bytes or not shortfalls:
        shortfalls["total"] = misfit.unplaced_bytes
    return DoesNotFitError(
        name,
        needed_bytes=needed,
        usable_bytes=needed - misfit.unplaced_bytes,
        shortfalls=shortfalls,
        details=rows,
    )
