"""The exact policy against brute force: every assignment of up to ten units, judged by the same wishes."""

from fractions import Fraction
from itertools import permutations, product

from hypothesis import given, settings
from strategies import problems

from bigload.devices import CPU, DISK, Device
from bigload.planning.choices import Balance
from bigload.planning.placement import (
    Misfit,
    Placement,
    device_loads,
    keeps_limits,
)
from bigload.planning.policies.bounds import lower_bound
from bigload.planning.policies.optimal import place_optimally, token_cost


def all_placements(problem):
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


def riders_are_well(problem, placement):
    running = placement.running
    riders = [index for index, unit in enumerate(problem.units) if unit.rides]
    return all(running[index] == running[index - 1] for index in riders)


def peak(problem, placement):
    shares = [
        Fraction(load.total, problem.budget.get(device))
        for device, load in device_loads(problem, placement).items()
        if device.is_accelerator
    ]
    return max(shares, default=Fraction(0))


def wishes(problem, placement):
    emptiest = peak(problem, placement) if problem.balance is Balance.SPREAD else 0
    return token_cost(problem, placement), placement.num_device_changes, emptiest


@settings(deadline=None)
@given(problem=problems(with_riders=False) | problems(max_units=7, max_accelerators=1))
def test_nothing_is_better_by_the_list_of_wishes(problem):
    best = min((wishes(problem, placement) for placement in all_placements(problem)), default=None)
    found = place_optimally(problem)
    if best is None:
        assert isinstance(found, Misfit)
    else:
        assert isinstance(found, Placement)
        assert wishes(problem, found) == best
        assert found.is_proven


@settings(deadline=None)
@given(problem=problems(max_units=10, max_accelerators=3))
def test_what_is_found_keeps_limits_order_and_riders(problem):
    found = place_optimally(problem)
    if isinstance(found, Placement):
        assert keeps_limits(problem, found)
        assert riders_are_well(problem, found)
        assert len(found.devices) == len(problem.units)


@settings(deadline=None)
@given(problem=problems(max_units=5, max_accelerators=2))
def test_no_placement_whatever_is_below_the_bound(problem):
    bound = lower_bound(problem)
    devices = [device for device, _ in problem.budget]
    for homes in product(devices, repeat=len(problem.units)):
        for execution in problem.budget.accelerators or [CPU]:
            placement = Placement(devices=homes, execution_device=execution, num_in_flight=problem.num_in_flight)
            if keeps_limits(problem, placement):
                off = [CPU, DISK] if problem.budget.accelerators else [DISK]
                held = held_by(problem, placement)
                assert sum(held.get(device, 0) for device in off) >= bound.offloaded_bytes
                assert held.get(DISK, 0) >= bound.disk_bytes
                assert token_cost(problem, placement) >= bound.cost


def held_by(problem, placement) -> dict[Device, int]:
    held: dict[Device, int] = {}
    for unit, device in zip(problem.units, placement.devices, strict=True):
        held[device] = held.get(device, 0) + unit.num_bytes
    return held
