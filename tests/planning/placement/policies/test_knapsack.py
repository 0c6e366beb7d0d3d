"""A choice of counts against all choices of counts."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.planning.placement.policies import knapsack
from bigload.planning.placement.policies.knapsack import Bin, ItemKind, KnapsackChoice, choose, upper_bound

numbers = st.integers(0, 6)
kinds = st.lists(st.builds(ItemKind, numbers, numbers, st.integers(0, 4), st.booleans()), max_size=3)


@st.composite
def bins(draw):
    """Two bins, the first of the greater weight."""
    lighter, heavier = sorted((draw(numbers), draw(numbers)))
    return Bin(draw(st.integers(0, 20)), heavier), Bin(draw(st.integers(0, 20)), lighter)


def all_choices(kinds, first, second, least):
    """Yield counts for both bins and their worth, of every choice that fits and keeps enough."""
    ways = [
        [
            (a, b)
            for a in range(kind.count + 1)
            for b in range(kind.count - a + 1)
            if a + b == kind.count or not kind.required
        ]
        for kind in kinds
    ]
    for counts in product(*ways):
        sizes = [sum(kind.size * pair[side] for kind, pair in zip(kinds, counts, strict=True)) for side in (0, 1)]
        if sizes[0] <= first.capacity and sizes[1] <= second.capacity and sum(sizes) >= least:
            yield counts, worth(kinds, counts, first, second)


def worth(kinds, counts, first, second):
    pairs = zip(kinds, counts, strict=True)
    return sum(kind.value * (a * first.weight + b * second.weight) for kind, (a, b) in pairs)


@given(kinds=kinds, bins=bins(), least=st.integers(0, 12))
def test_no_choice_that_fits_is_worth_more(kinds, bins, least):
    choices = dict(all_choices(kinds, *bins, least))
    found = choose(kinds, *bins, least=least)
    if not choices:
        assert found is None
    else:
        assert found.exact
        counts = tuple(zip(found.first, found.second, strict=True))
        assert choices[counts] == found.worth == max(choices.values())


@given(kinds=kinds, bins=bins())
def test_no_choice_is_worth_more_than_the_bound(kinds, bins):
    assert upper_bound(kinds, *bins) >= max((value for _, value in all_choices(kinds, *bins, 0)), default=0)


@pytest.mark.parametrize("capacities", [(-1, 5), (5, -1)])
def test_less_room_than_none_holds_nothing(capacities):
    assert choose([], Bin(capacities[0], 1), Bin(capacities[1], 1)) is None


def test_more_than_there_is_cannot_be_kept():
    assert choose([ItemKind(2, 1, 3)], Bin(100, 1), Bin(100, 1), least=7) is None


def test_where_a_search_takes_too_long_a_choice_that_fits_is_given_and_said_not_to_be_the_best(monkeypatch):
    monkeypatch.setattr(knapsack, "MAX_STEPS", 11)
    kinds = [ItemKind(size, size + size % 3, 2) for size in range(5, 15)]
    found = choose(kinds, Bin(41, 2), Bin(23, 1))
    assert not found.exact
    counts = tuple(zip(found.first, found.second, strict=True))
    assert found.worth == worth(kinds, counts, Bin(41, 2), Bin(23, 1))
    assert sum(kind.size * count for kind, count in zip(kinds, found.first, strict=True)) <= 41
    assert sum(kind.size * count for kind, count in zip(kinds, found.second, strict=True)) <= 23


def test_where_a_search_finds_nothing_in_its_time_it_says_that_there_is_nothing(monkeypatch):
    monkeypatch.setattr(knapsack, "MAX_STEPS", 0)
    kinds = [ItemKind(size, 1, 1) for size in (7, 5, 4, 3)]
    assert choose(kinds, Bin(9, 1), Bin(0, 0), least=9) in (
        None,
        KnapsackChoice((0, 1, 1, 0), (0, 0, 0, 0), 2, exact=False),
    )
