"""The exact policy against brute force: every assignment of up to seven units, judged by the same wishes."""

from dataclasses import replace
from fractions import Fraction

from brute_force import placements_in_any_order, placements_in_order, riders_are_well
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies import problems

from bigload.devices import CPU, DISK, Device
from bigload.planning.choices import Balance, Policy
from bigload.planning.placement.optimality import Verdict, certify
from bigload.planning.placement.policies import optimal
from bigload.planning.placement.policies.bounds import least_accelerators, lower_bound
from bigload.planning.placement.policies.optimal import place_optimally, token_cost
from bigload.planning.placement.problem import Misfit, Placement, device_loads, keeps_limits
from bigload.planning.placement.solve import place_by
from builders import problem_of, unit_of


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
    best = min((wishes(problem, placement) for placement in placements_in_order(problem)), default=None)
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
    off = [CPU, DISK] if problem.budget.accelerators else [DISK]
    for placement in placements_in_any_order(problem):
        held = held_by(problem, placement)
        assert sum(held.get(device, 0) for device in off) >= bound.offloaded_bytes
        assert held.get(DISK, 0) >= bound.disk_bytes
        assert token_cost(problem, placement) >= bound.cost
        running = {device for device in placement.running if device.is_accelerator}
        if running:
            assert len(running) >= least_accelerators(problem, token_cost(problem, placement))


@given(problem=problems(max_units=5, max_accelerators=2), policy=st.sampled_from(Policy))
def test_a_certificate_claims_nothing_that_brute_force_denies(problem, policy):
    if policy is not Policy.OPTIMAL:
        problem = replace(problem, units=tuple(replace(unit, is_routed=False) for unit in problem.units))
    placement = place_by(policy, problem)
    assume(isinstance(placement, Placement))
    certificate = certify(problem, placement)
    off = [CPU, DISK] if problem.budget.accelerators else [DISK]
    held = held_by(problem, placement)
    assert certificate.offloaded_bytes == sum(held.get(device, 0) for device in off)
    assert certificate.disk_bytes == held.get(DISK, 0)
    assert certificate.least_offloaded_bytes <= certificate.offloaded_bytes
    assert certificate.least_disk_bytes <= certificate.disk_bytes
    cost = token_cost(problem, placement)
    if certificate.verdict is Verdict.OPTIMAL:
        assert cost <= min(token_cost(problem, other) for other in placements_in_any_order(problem))
    if certificate.verdict is Verdict.OPTIMAL_IN_ORDER:
        assert cost <= min(token_cost(problem, other) for other in placements_in_order(problem))


def held_by(problem, placement) -> dict[Device, int]:
    held: dict[Device, int] = {}
    for unit, device in zip(problem.units, placement.devices, strict=True):
        held[device] = held.get(device, 0) + unit.num_bytes
    return held


def test_what_fits_in_order_with_whole_blocks_fits_with_experts_apart():
    # Only the last unit is small enough for the RAM there is, and it lies behind the second accelerator's stretch.
    units = [unit_of(1), unit_of(5, is_routed=True), unit_of(1), unit_of(5, is_routed=True), unit_of(2)]
    problem = problem_of(units, {"cuda:0": 8, "cuda:1": 6, "cpu": 2}, use_disk=False)
    found = place_optimally(problem)
    assert isinstance(found, Placement)
    assert [str(device) for device in found.devices] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1", "cpu"]
    assert keeps_limits(problem, found)


def test_nothing_is_proven_when_not_all_orders_were_tried(monkeypatch):
    problem = problem_of([5, 5, 5, 5], dict.fromkeys(("cuda:0", "cuda:1", "cuda:2", "cuda:3"), 9), any_order=True)
    assert place_optimally(problem).is_proven
    monkeypatch.setattr(optimal, "MAX_ORDERS", 1)
    assert not place_optimally(problem).is_proven
