"""The fullest accelerator is as empty as any assignment in order can make it; brute force is the judge."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bigload.devices import CPU, DISK, Device
from bigload.planning.placement.policies.balanced import place_balanced, place_balanced_low_0
from bigload.planning.placement.policies.sequential import place_sequentially
from bigload.planning.placement.problem import Misfit, Placement
from builders import problem_of

GPUS = [Device("cuda", index) for index in range(3)]
sizes = st.lists(st.integers(0, 12), min_size=1, max_size=7)
limits = st.lists(st.integers(1, 40), min_size=1, max_size=3)


def problem(sizes, limits, **others):
    return problem_of(sizes, {**{f"cuda:{index}": limit for index, limit in enumerate(limits)}, **others})


def loads(sizes, devices, count):
    totals = [0] * count
    for size, device in zip(sizes, devices, strict=True):
        totals[device.index] += size
    return totals


def every_way(sizes, limits):
    """The loads of all assignments in order that keep the limits."""
    for choice in combinations_with_replacement(range(len(limits)), len(sizes)):
        totals = loads(sizes, [GPUS[index] for index in choice], len(limits))
        if all(total <= limit for total, limit in zip(totals, limits, strict=True)):
            yield totals


@given(sizes, limits)
def test_no_assignment_in_order_has_a_lower_peak(sizes, limits):
    ways = list(every_way(sizes, limits))
    assume(ways)
    found = place_balanced(problem(sizes, limits))
    assert isinstance(found, Placement)
    assert max(loads(sizes, found.devices, len(limits))) == min(max(totals) for totals in ways)


@given(sizes, limits)
def test_no_assignment_in_order_leaves_the_first_device_emptier(sizes, limits):
    ways = list(every_way(sizes, limits))
    assume(ways)
    found = place_balanced_low_0(problem(sizes, limits))
    assert isinstance(found, Placement)
    totals = loads(sizes, found.devices, len(limits))
    best = min((way[0], max(way[1:], default=0)) for way in ways)
    assert (totals[0], max(totals[1:], default=0)) == best


@given(sizes, limits, st.integers(1, 30))
def test_what_does_not_fit_on_accelerators_is_placed_sequentially(sizes, limits, ram):
    assume(not any(every_way(sizes, limits)))
    asked = problem(sizes, limits, cpu=ram)
    assert place_balanced(asked) == place_balanced_low_0(asked) == place_sequentially(asked)


@given(sizes, limits)
def test_the_model_runs_where_its_first_unit_is(sizes, limits):
    found = place_balanced_low_0(problem(sizes, limits))
    assume(isinstance(found, Placement) and found.devices[0] not in (CPU, DISK))
    assert found.execution_device == found.devices[0]


def test_the_examples_of_the_docstrings():
    blocks = [3, 3, 2, 2]
    assert place_balanced(problem(blocks, [10, 10])).devices == (GPUS[0], GPUS[0], GPUS[1], GPUS[1])
    assert place_sequentially(problem(blocks, [10, 10])).devices == (GPUS[0],) * 4
    low = place_balanced_low_0(problem(blocks, [10, 4, 4]))
    assert low.devices == (GPUS[0], GPUS[1], GPUS[2], GPUS[2])


def test_without_accelerators_there_is_nothing_to_balance():
    asked = problem([3, 3], [], cpu=10)
    assert place_balanced(asked) == place_sequentially(asked)


@pytest.mark.parametrize("policy", [place_balanced, place_balanced_low_0])
def test_a_misfit_stays_a_misfit(policy):
    assert isinstance(policy(problem_of([30], {"cuda:0": 10, "cpu": 10}, use_disk=False)), Misfit)
