"""Prediction of the next block from the order of earlier ones."""

import threading
from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from bigload.runtime.streaming.run_order import RunOrder


def ahead(order, count=4):
    return list(islice(order.ahead(), count))


def test_before_anything_ran_nothing_is_expected_and_then_the_next_of_the_guess():
    order = RunOrder("abc")
    assert ahead(order) == []
    order.entered("b")
    assert ahead(order) == ["c", "a", "b", "c"]


def test_a_loop_goes_round():
    order = RunOrder("abc")
    for block in "acbacb":
        order.entered(block)
    assert ahead(order, 6) == list("acbacb")


def test_a_block_that_runs_twice_in_a_pass_is_expected_twice():
    order = RunOrder("abcd")
    for block in "abcbdabcbd":
        order.entered(block)
    assert ahead(order, 5) == list("abcbd")


def test_an_encoder_that_runs_once_costs_one_wrong_guess():
    order = RunOrder("ede")
    wrong = 0
    for block in ["e1", "e2", *["d1", "d2", "d3"] * 4]:
        wrong += next(order.ahead(), block) != block
        order.entered(block)
    assert wrong <= 5
    assert ahead(order, 3) == ["d1", "d2", "d3"]


def test_what_broke_off_says_nothing_of_what_comes_next():
    order = RunOrder("abc")
    for block in "ab":
        order.entered(block)
    order.forward_aborted()
    assert ahead(order) == []
    order.entered("a")
    assert ahead(order, 2) == ["b", "c"]


def test_each_thread_has_a_place_of_its_own():
    order = RunOrder("abc")
    order.entered("a")
    found = []
    thread = threading.Thread(target=lambda: (order.entered("b"), found.append(ahead(order, 1))))
    thread.start()
    thread.join()
    assert found == [["c"]]
    assert ahead(order, 1) == ["b"]


@given(passes=st.lists(st.lists(st.integers(0, 6), max_size=10), max_size=5), steady=st.permutations(range(6)))
def test_whatever_ran_before_a_loop_is_learnt_in_two_rounds(passes, steady):
    order = RunOrder(range(7))
    for one in passes:
        for block in one:
            order.entered(block)
    for block in steady * 3:
        order.entered(block)
    assert ahead(order, 12) == steady * 2
