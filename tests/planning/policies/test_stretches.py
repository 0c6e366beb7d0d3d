"""Placements of one stretch for each accelerator against all of them."""

from brute_force import placements_in_order
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import problems

from bigload.devices import Device
from bigload.planning.placement import Placement, keeps_limits
from bigload.planning.policies.optimal import token_cost
from bigload.planning.policies.stretches import Stretches
from builders import problem_of

CUDA1, CUDA2 = Device("cuda", 1), Device("cuda", 2)


def in_stretches(placement):
    """Whether no device runs something, stops, and runs something again."""
    return placement.num_device_changes == len(set(placement.running)) - 1


def rank(problem, placement):
    return token_cost(problem, placement), placement.num_device_changes


def as_placement(problem, found):
    return Placement(
        devices=found.devices, execution_device=found.execution_device, num_in_flight=problem.num_in_flight
    )


@given(problem=problems(max_units=5))
def test_no_placement_in_stretches_ranks_lower(problem):
    assume(not problem.any_order)
    others = [rank(problem, other) for other in placements_in_order(problem) if in_stretches(other)]
    found = Stretches(problem).best(problem.accelerators)
    if found is None:
        assert others == []
    else:
        placement = as_placement(problem, found)
        assert keeps_limits(problem, placement)
        assert in_stretches(placement)
        assert found.rank == rank(problem, placement) == min(others)


@given(problem=problems(max_units=8, max_accelerators=3), cost=st.integers(0, 300), changes=st.integers(0, 2))
def test_with_a_limit_to_the_rank_nothing_above_it_is_found_and_the_best_below_it_is(problem, cost, changes):
    best = Stretches(problem).best(problem.accelerators)
    found = Stretches(problem).best(problem.accelerators, at_most=(cost, changes))
    expected = best if best is not None and best.rank <= (cost, changes) else None
    assert (found is None) == (expected is None)
    assert found is None or found.rank == expected.rank


def test_a_model_that_fits_is_on_the_fewest_devices_each_as_full_as_it_goes():
    problem = problem_of([2, 2, 2, 2], {"cuda:0": 1, "cuda:1": 6, "cuda:2": 6})
    found = Stretches(problem).best(problem.accelerators)
    assert found.devices == (CUDA1, CUDA1, CUDA1, CUDA2)
    assert found.rank == (0, 1)


def test_starts_are_the_first_positions_from_which_devices_hold_the_rest():
    problem = problem_of([2, 2, 2, 2], {"cuda:0": 4, "cuda:1": 2})
    assert Stretches(problem).starts(problem.accelerators) == [[4, 4, 4], [2, 3, 4], [1, 3, 4]]
