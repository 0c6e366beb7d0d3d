"""Placements of one stretch for each accelerator against all of them."""

import pytest
from brute_force import placements_in_order
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import problems

from bigload.devices import Device
from bigload.planning.placement.policies import contiguous_ranges as stretches
from bigload.planning.placement.policies import optimal
from bigload.planning.placement.policies.contiguous_ranges import MAX_STEPS, RangeSearch, roomier
from bigload.planning.placement.policies.interleaved_streaming import MAX_LABELS
from bigload.planning.placement.policies.optimal import place_optimally, token_cost
from bigload.planning.placement.problem import Placement, keeps_limits
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
    found = RangeSearch(problem).best(problem.accelerators)
    if found is None:
        assert others == []
    else:
        placement = as_placement(problem, found)
        assert keeps_limits(problem, placement)
        assert in_stretches(placement)
        assert found.rank == rank(problem, placement) == min(others)


@given(problem=problems(max_units=8, max_accelerators=3), cost=st.integers(0, 300), changes=st.integers(0, 2))
def test_with_a_limit_to_the_rank_nothing_above_it_is_found_and_the_best_below_it_is(problem, cost, changes):
    best = RangeSearch(problem).best(problem.accelerators)
    found = RangeSearch(problem).best(problem.accelerators, at_most=(cost, changes))
    expected = best if best is not None and best.rank <= (cost, changes) else None
    assert (found is None) == (expected is None)
    assert found is None or found.rank == expected.rank


def test_a_model_that_fits_is_on_the_fewest_devices_each_as_full_as_it_goes():
    problem = problem_of([2, 2, 2, 2], {"cuda:0": 1, "cuda:1": 6, "cuda:2": 6})
    found = RangeSearch(problem).best(problem.accelerators)
    assert found.devices == (CUDA1, CUDA1, CUDA1, CUDA2)
    assert found.rank == (0, 1)


def test_starts_are_the_first_positions_from_which_devices_hold_the_rest():
    problem = problem_of([2, 2, 2, 2], {"cuda:0": 4, "cuda:1": 2})
    assert RangeSearch(problem).starts(problem.accelerators) == [[4, 4, 4], [2, 3, 4], [1, 3, 4]]


def test_the_first_accelerator_used_is_one_with_more_room_than_those_before():
    rooms = [(Device("cuda", index), room) for index, room in enumerate([5, 3, 5, 8, 7, 9])]
    assert roomier(rooms) == [0, 3, 5]
    assert roomier([]) == []


GIB = 1024**3
UNLIKE_CARDS = {f"cuda:{index}": size * GIB for index, size in enumerate([24, 16, 12, 11, 10, 8, 6, 4])}
LARGE = {
    "eight unlike cards in any order": lambda: problem_of(
        [2 * GIB, *[GIB * 3 // 2 + index % 5 for index in range(80)], 2 * GIB],
        {**UNLIKE_CARDS, "cpu": 200 * GIB},
        any_order=True,
    ),
    "a thousand cards": lambda: problem_of([4] * 3000, {**{f"cuda:{i}": 9 for i in range(1000)}, "cpu": 12000}),
    "twenty thousand layers": lambda: problem_of([1] * 20_000, {"cuda:0": 7000, "cuda:1": 5000, "cpu": 20_000}),
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.sample(1)
def test_a_large_problem_ends_after_a_number_of_steps(name):
    """Steps are counted, not seconds: the same question has the same answer on every machine."""
    problem = LARGE[name]()
    search = optimal._PlacementSearch(problem)
    found = search.answer()
    assert isinstance(found, Placement)
    assert keeps_limits(problem, found)
    # One more division, of as many kinds as there are, may have begun when the steps were used up.
    assert search.ranges.steps <= 2 * MAX_STEPS
    assert search.interleaved.steps <= 2 * MAX_LABELS


def test_a_search_that_gives_up_says_that_its_answer_is_not_exact(monkeypatch):
    problem = problem_of([5, 4, 3, 2, 5, 4], {"cuda:0": 9, "cpu": 30})
    assert place_optimally(problem).is_proven
    monkeypatch.setattr(stretches, "MAX_STEPS", 1)
    found = place_optimally(problem)
    assert isinstance(found, Placement)
    assert not found.is_proven
