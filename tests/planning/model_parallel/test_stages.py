"""Stages: no other cut of the same pieces has a smaller largest stage, and each unit counts once where it is held."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.planning.model_parallel.stages import StageSizes, cut_into_stages


@st.composite
def sizes(draw):
    """Steps of units, some of which run several times, and pieces of one or more steps."""
    units = draw(st.lists(st.integers(0, 6), min_size=1, max_size=9))
    held = draw(st.lists(st.integers(0, 20), min_size=7, max_size=7))
    own = draw(st.lists(st.integers(0, 5), min_size=len(units), max_size=len(units)))
    starts = sorted({0, *draw(st.sets(st.integers(0, len(units) - 1)))})
    return StageSizes(tuple(units), tuple(held[unit] for unit in units), tuple(own), tuple(starts))


def by_hand(found, first, stop):
    """What the pieces from `first` to `stop` hold, unit by unit."""
    edges = [*found.starts, len(found.units)]
    steps = range(edges[first], edges[stop])
    held = {found.units[step]: found.held_bytes[step] for step in steps}
    return sum(held.values()) + sum(found.own_bytes[step] for step in steps)


@given(sizes(), st.data())
def test_a_range_holds_each_of_its_units_once(found, data):
    first = data.draw(st.integers(0, found.num_pieces - 1))
    stop = data.draw(st.integers(first + 1, found.num_pieces))
    assert found.num_bytes(first, stop) == by_hand(found, first, stop)


@given(sizes(), st.data())
def test_no_cut_has_a_smaller_largest_stage(found, data):
    num_stages = data.draw(st.integers(1, found.num_pieces))
    cuts = cut_into_stages(found, num_stages)
    assert (cuts[0], cuts[-1], len(cuts)) == (0, found.num_pieces, num_stages + 1)
    assert sorted(set(cuts)) == list(cuts), "no stage is empty"

    def largest(edges):
        return max(by_hand(found, *pair) for pair in pairwise(edges))

    every = combinations(range(1, found.num_pieces), num_stages - 1)
    assert largest(cuts) == min(largest((0, *inner, found.num_pieces)) for inner in every)


def test_equal_blocks_are_shared_evenly():
    equal = StageSizes(tuple(range(12)), (5,) * 12, (0,) * 12, tuple(range(12)))
    assert cut_into_stages(equal, 4) == (0, 3, 6, 9, 12)


def test_more_stages_than_pieces_are_refused():
    with pytest.raises(ValueError, match="3 stages of 2 pieces"):
        cut_into_stages(StageSizes((0, 1), (1, 1), (0, 0), (0, 1)), 3)
