"""Placements with streamed units anywhere against all of them, and what happens when the search gives up."""

import pytest
from brute_force import placements_in_order
from hypothesis import assume, given
from strategies import problems

from bigload.devices import CPU, DISK, Device
from bigload.planning.placement.policies import interleaved_streaming as runs
from bigload.planning.placement.policies.contiguous_ranges import RangeSearch
from bigload.planning.placement.policies.interleaved_streaming import InterleavedSearch
from bigload.planning.placement.policies.optimal import place_optimally, token_cost
from bigload.planning.placement.problem import Placement, keeps_limits
from builders import problem_of, unit_of

CUDA0, CUDA1 = Device("cuda", 0), Device("cuda", 1)


def rank(problem, placement):
    return token_cost(problem, placement), placement.num_device_changes


@given(problem=problems(max_units=5, with_riders=False))
def test_no_placement_in_order_that_streams_something_ranks_lower(problem):
    assume(problem.accelerators and not problem.any_order)
    streaming = [
        rank(problem, other)
        for other in placements_in_order(problem)
        if not all(device.is_accelerator for device in other.devices)
    ]
    search = InterleavedSearch(RangeSearch(problem))
    found = search.best(problem.accelerators, None)
    assert not search.gave_up
    if found is None:
        assert streaming == []
    else:
        placement = Placement(
            devices=found.devices, execution_device=found.execution_device, num_in_flight=problem.num_in_flight
        )
        assert keeps_limits(problem, placement)
        assert found.rank == rank(problem, placement) <= min(streaming, default=found.rank)
        assert InterleavedSearch(RangeSearch(problem)).best(problem.accelerators, found.rank) is None


MIXED = [5, 2, 3, 5, 2, 7, 3, 2, 5, 3, 7, 2]
"""Unlike blocks on unlike devices: the last ones would rather be streamed, and stretches stream the first."""

LIMITS = {"cuda:0": 12, "cuda:1": 9, "cpu": 200}


def test_a_unit_that_stretches_could_not_stream_is_streamed_after_another_device_has_run():
    problem = problem_of([1, 4, 4, 3], {"cuda:0": 4, "cuda:1": 8, "cpu": 100})
    found = place_optimally(problem)
    assert found.devices == (CUDA0, CUDA1, CUDA1, CPU)
    assert found.num_device_changes == 2


def test_the_execution_device_is_left_before_it_is_full_where_a_later_cache_needs_the_room():
    # The 1 would fit on cuda:0 too, and then the cache of the last block, which is streamed, would not.
    block = unit_of(7, cache_bytes=2)
    problem = problem_of([block, block, block, 1, block], {"cuda:0": 36, "cuda:1": 1})
    found = place_optimally(problem)
    assert found.devices == (CUDA0, CUDA0, CUDA0, CUDA1, DISK)
    assert found.is_proven


def test_the_execution_device_is_left_early_where_what_is_streamed_later_needs_its_room():
    streamed = unit_of(9, name="layers.6", cache_bytes=3)
    problem = problem_of([2] * 6 + [streamed], {"cuda:0": 14, "cuda:1": 10, "cpu": 100})
    found = place_optimally(problem)
    assert found.devices == (CUDA0, *[CUDA1] * 5, CPU)


@pytest.mark.parametrize("limit", [0, 10])
def test_a_search_that_gives_up_says_that_its_answer_is_not_proven(monkeypatch, limit):
    problem = problem_of(MIXED, LIMITS)
    proven = place_optimally(problem)
    assert proven.is_proven
    monkeypatch.setattr(runs, "MAX_LABELS", limit)
    found = place_optimally(problem)
    assert not found.is_proven
    assert keeps_limits(problem, found)
    assert rank(problem, found) >= rank(problem, proven)
