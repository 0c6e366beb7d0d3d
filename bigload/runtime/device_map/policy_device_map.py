"""Device maps from the policies that also make plans for checkpoints: bigload's own answer for a model of modules."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from bigload.devices import Device
from bigload.errors import DoesNotFitError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.model.units import Unit
from bigload.planning.placement.problem import Misfit, Placement, PlacementProblem
from bigload.planning.placement.solve import Solution, solve
from bigload.runtime.device_map.device_memory import DeviceKey
from bigload.runtime.device_map.module_sizes import Size
from bigload.units import MAX_SIZE, format_size


def map_by_policy(
    policy: str, units: Sequence[Unit], limits: Mapping[DeviceKey, Size], *, model_name: str
) -> OrderedDict[str, DeviceKey]:
    """Return the device of every part of `units`, in their order, as the policy of that name places them.

    Raises:
        DoesNotFitError: the policy found no placement that keeps every limit.
        BudgetError: no device that computes has memory.
        OptionError: there is no such policy.
    """
    budget = _budget(limits)
    placement = _place(policy, units, budget)
    if isinstance(placement, Misfit):
        raise _does_not_fit(model_name, units, budget, placement)
    return OrderedDict(
        (part.name, _key(device)) for unit, device in zip(units, placement.devices, strict=True) for part in unit.parts
    )


def _place(policy: str, units: Sequence[Unit], budget: MemoryBudget) -> Placement | Misfit:
    found = solve(PlacementProblem(units=units, budget=budget), policy)
    return found.placement if isinstance(found, Solution) else found


def _budget(limits: Mapping[DeviceKey, Size]) -> MemoryBudget:
    """Return limits as policies take them: no limit is the largest one."""
    return MemoryBudget.of({str(key): MAX_SIZE if limit == math.inf else int(limit) for key, limit in limits.items()})


def _key(device: Device) -> DeviceKey:
    return device.kind if device.index is None else device.index


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
