"""Blocks that stay: a fixed set, evenly among the others, within the bytes that there are."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigload.runtime.streaming import streaming_limits
from bigload.runtime.streaming.streaming_limits import StreamOptions, chosen_evenly, limits_for


def block(num_bytes, *, is_routed=False, in_place=True, is_fused=False):
    paged = num_bytes if in_place else 0
    return _Block(
        num_bytes=num_bytes, num_page_bytes=paged, is_in_place=in_place, is_routed=is_routed, is_fused=is_fused
    )


class _Block(SimpleNamespace):
    is_kept = False

    __eq__, __hash__ = object.__eq__, object.__hash__


@pytest.fixture
def free(monkeypatch):
    def set_free(num_bytes):
        monkeypatch.setattr(streaming_limits, "available_memory", lambda: num_bytes)

    set_free(1000)
    return set_free


def test_of_ten_with_room_for_four_it_is_as_the_docstring_says():
    blocks = [block(10) for _ in range(10)]
    chosen = list(chosen_evenly(blocks, 40))
    assert [number for number, each in enumerate(blocks, 1) if each in chosen] == [3, 5, 8, 10]


@given(sizes=st.lists(st.integers(0, 1000), max_size=30), num_bytes=st.integers(0, 40_000))
def test_no_more_than_there_is_and_all_of_them_if_there_is_enough(sizes, num_bytes):
    blocks = [block(size) for size in sizes]
    chosen = list(chosen_evenly(blocks, num_bytes))
    assert sum(each.num_bytes for each in chosen) <= num_bytes
    if sum(sizes) <= num_bytes:
        assert len([each for each in chosen if each.num_bytes]) == len([size for size in sizes if size])


@given(count=st.integers(1, 60), size=st.integers(1, 10**12), room=st.floats(0, 1))
def test_of_equal_blocks_as_many_stay_as_fit_and_gaps_differ_by_one_at_most(count, size, room):
    fitting = int(count * room)
    blocks = [block(size) for _ in range(count)]
    chosen = [number for number, each in enumerate(blocks) if each in set(chosen_evenly(blocks, fitting * size))]
    assert len(chosen) == fitting
    gaps = [
        after - before
        for before, after in zip(chosen, [*chosen[1:], *(number + count for number in chosen[:1])], strict=True)
    ]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_by_default_two_of_the_largest_come_ahead_and_pages_that_fit_stay(free):
    room = limits_for([block(10), block(30)], StreamOptions())
    assert (room.prefetch_bytes, room.resident_bytes, room.uncached) == (60, 40, frozenset())


def test_what_has_to_be_copied_does_not_stay_by_default(free):
    assert limits_for([block(10, in_place=False), block(30)], StreamOptions()).resident_bytes == 0


def test_pages_that_do_not_fit_together_are_forgotten_but_for_as_many_as_do(free):
    free(100)
    blocks = [block(10) for _ in range(10)]
    room = limits_for(blocks, StreamOptions())
    assert room.resident_bytes == 0
    assert len(room.uncached) == 3  # one runs and two are prefetched beside those that stay


def test_what_is_left_is_for_routed_ones(free):
    room = limits_for([block(10), block(7, is_routed=True)], StreamOptions(resident_bytes=15))
    assert (room.resident_bytes, room.expert_bytes) == (15, 5)


def test_experts_in_shared_parameters_have_their_part_of_the_window(free):
    blocks = [block(30), *(block(10, is_routed=True, is_fused=True) for _ in range(4))]
    room = limits_for(blocks, StreamOptions())
    assert (room.prefetch_bytes, room.expert_prefetch_bytes) == (60, 20)
    room = limits_for(blocks, StreamOptions(prefetch_bytes=40))
    assert (room.prefetch_bytes, room.expert_prefetch_bytes) == (30, 10)


@pytest.mark.parametrize(("in_place", "expert_bytes"), [(True, 60), (False, 30)])
def test_of_experts_that_do_not_fit_as_many_stay_as_do(free, in_place, expert_bytes):
    free(100)
    experts = [expert(10, in_place) for _ in range(10)]
    room = limits_for([block(20), *experts], StreamOptions())
    assert (room.resident_bytes, room.expert_bytes) == (20 + expert_bytes, expert_bytes)


def expert(num_bytes, in_place):
    made = block(num_bytes, is_routed=True, is_fused=True, in_place=in_place)
    made.num_page_bytes = num_bytes
    return made


def test_a_plan_bounds_what_runs_and_what_comes_together(free):
    assert limits_for([block(10), block(30)], StreamOptions(workspace_bytes=50)).prefetch_bytes == 20
    assert limits_for([block(10), block(30)], StreamOptions(workspace_bytes=20)).prefetch_bytes == 0
    assert limits_for([block(10)], StreamOptions(workspace_bytes=20, prefetch_bytes=7)).prefetch_bytes == 7


def test_a_model_without_blocks_needs_none(free):
    assert limits_for([], StreamOptions()).prefetch_bytes == 0
