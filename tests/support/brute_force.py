"""All placements there are, for problems so small that they can be counted; the judges of clever searches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from bigload.devices import CPU
from bigload.planning.placement.problem import Placement, PlacementProblem, keeps_limits


def placements_in_order(problem: PlacementProblem) -> Iterator[Placement]:
    """Yield every placement that fills accelerators in order and keeps all limits."""
    accelerators = problem.budget.accelerators
    devices = [device for device, _ in problem.budget]
    orders = list(permutations(accelerators)) if problem.any_order else [accelerators]
    for homes in product(devices, repeat=len(problem.units)):
        resident = [device for device in homes if device.is_accelerator]
        stretches = [device for index, device in enumerate(resident) if index == 0 or resident[index - 1] != device]
        if not any(list(filter(stretches.__contains__, order)) == stretches for order in orders):
            continue
        for execution in resident[:1] or accelerators or [CPU]:
            placement = Placement(devices=homes, execution_device=execution, num_in_flight=problem.num_in_flight)
            if riders_are_well(problem, placement) and keeps_limits(problem, placement):
                yield placement


def riders_are_well(problem: PlacementProblem, placement: Placement) -> bool:
    """Return whether all units that ride run where the unit before them does."""
    running = placement.running
    riders = [index for index, unit in enumerate(problem.units) if unit.is_routed]
    return all(running[index] == running[index - 1] for index in riders)


def placements_in_any_order(problem: PlacementProblem) -> Iterator[Placement]:
    """Yield every placement that keeps all limits, whatever the order and whoever is_routed."""
    devices = [device for device, _ in problem.budget]
    for homes in product(devices, repeat=len(problem.units)):
        for execution in problem.budget.accelerators or [CPU]:
            placement = Placement(devices=homes, execution_device=execution, num_in_flight=problem.num_in_flight)
            if keeps_limits(problem, placement):
                yield placement
