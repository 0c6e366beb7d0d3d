from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bigload.planning.timing.pipeline import Step, Work, simulate

SECONDS = st.floats(0, 10)
LANES = st.lists(
    st.tuples(st.sampled_from(["disk", "link", "ram"]), SECONDS), max_size=3, unique_by=lambda each: each[0]
)
WORKS = st.lists(
    st.builds(
        Work,
        name=st.just("block"),
        device=st.sampled_from(["cpu", "cuda:0"]),
        seconds=SECONDS,
        routed_seconds=SECONDS,
        last_routed_seconds=SECONDS,
        fetch=LANES.map(tuple),
        fetch_bytes=st.integers(0, 5),
        routed_fetch=LANES.map(tuple),
    ),
    min_size=1,
    max_size=8,
)


def streamed(name, compute, fetch, *, num_bytes=1):
    return Work(name=name, device="cpu", seconds=compute, fetch=(("disk", fetch),), fetch_bytes=num_bytes)


def test_a_block_waits_for_its_weights_and_those_that_follow_come_meanwhile():
    # a is read from 0 to 3, b from 3 to 6 while a computes, and c, for which there is room once b runs, from 6 to 9.
    works = [streamed("a", 2, 3), streamed("b", 2, 3), streamed("c", 2, 3)]
    ended = list(simulate(works, window_bytes=1))
    assert [end for end, _ in ended] == [5, 8, 11]
    assert [step for _, steps in ended for step in steps] == [
        Step("disk", "a", 0, 3),
        Step("disk", "b", 3, 3),
        Step("cpu", "a", 3, 2),
        Step("disk", "c", 6, 3),
        Step("cpu", "b", 6, 2),
        Step("cpu", "c", 9, 2),
    ]


def test_without_a_window_nothing_is_read_while_a_block_computes():
    assert [end for end, _ in simulate([streamed("a", 2, 3)] * 3, window_bytes=0)] == [5, 10, 15]


def test_a_block_that_stays_gives_the_next_one_time_to_come():
    works = [Work(name="stays", device="cpu", seconds=4), streamed("comes", 1, 3)]
    assert [end for end, _ in simulate(works, window_bytes=1)] == [4, 5]


def test_experts_are_read_once_the_rest_of_their_block_has_run_and_the_last_then_computes():
    def end(routed_seconds):
        fetch = (("disk", 5),)
        work = Work(
            name="a",
            device="cpu",
            seconds=2,
            routed_seconds=routed_seconds,
            last_routed_seconds=routed_seconds / 4,
            routed_fetch=fetch,
        )
        return next(end for end, _ in simulate([work], window_bytes=9))

    assert end(4) == 2 + 5 + 1
    assert end(40) == 2 + 40


@given(WORKS, st.integers(0, 10))
def test_no_lane_does_two_things_at_a_time_and_no_run_is_shorter_than_what_a_lane_does(works, window):
    ended = list(simulate(works, window))
    steps = sorted((step for _, begun in ended for step in begun), key=lambda step: step.start_seconds)
    for lane in {step.lane for step in steps}:
        mine = [step for step in steps if step.lane == lane and step.seconds]
        assert all(one.start_seconds + one.seconds <= other.start_seconds + 1e-9 for one, other in pairwise(mine))
        assert ended[-1][0] >= sum(step.seconds for step in mine) - 1e-9


@given(WORKS, st.integers(0, 10), st.integers(0, 10), st.floats(1, 4))
def test_a_larger_window_and_faster_lanes_are_never_slower(works, window, more, factor):
    def end(works, window):
        return list(simulate(works, window))[-1][0]

    faster = [
        Work(
            name=work.name,
            device=work.device,
            seconds=work.seconds / factor,
            routed_seconds=work.routed_seconds,
            last_routed_seconds=work.last_routed_seconds,
            fetch=tuple((lane, seconds / factor) for lane, seconds in work.fetch),
            fetch_bytes=work.fetch_bytes,
            routed_fetch=work.routed_fetch,
        )
        for work in works
    ]
    assert end(faster, window) <= end(works, window) + 1e-9
    if not any(work.routed_fetch for work in works):  # experts wait for what was requested ahead of them
        assert end(works, window + more) <= end(works, window) + 1e-9
