import pytest

from bigload.planning.choices import Policy
from bigload.planning.placement.optimality import Certificate, Verdict, certify
from bigload.planning.placement.solve import place_by
from bigload.units import GIB
from builders import problem_of


def certificate(verdict=Verdict.BOUNDED, offloaded=10, least=4, largest=4):
    return Certificate(
        verdict=verdict,
        offloaded_bytes=offloaded * GIB,
        least_offloaded_bytes=least * GIB,
        disk_bytes=0,
        least_disk_bytes=0,
        largest_bytes=largest * GIB,
    )


def certified(sizes, limits, policy=Policy.OPTIMAL):
    problem = problem_of(sizes, limits)
    return certify(problem, place_by(policy, problem))


@pytest.mark.parametrize(
    ("offloaded", "least", "largest", "blocks"),
    [(10, 10, 4, 0), (10, 4, 4, 2), (12, 4, 4, 2), (5, 4, 4, 1), (0, 0, 0, 0)],
)
def test_a_gap_is_told_in_blocks_rounded_up(offloaded, least, largest, blocks):
    assert certificate(offloaded=offloaded, least=least, largest=largest).within_blocks == blocks


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (certificate(Verdict.OPTIMAL), "optimal: no plan streams less"),
        (certificate(), "no plan at all offloads less than 4.00 GiB (within 2 blocks)"),
        (certificate(offloaded=4), "no plan at all offloads less than 4.00 GiB (equal to the bound in bytes)"),
        (
            certificate(Verdict.OPTIMAL_IN_ORDER, offloaded=5),
            "optimal with modules in order, streamed to the first device used; "
            "no plan at all offloads less than 4.00 GiB (within 1 block)",
        ),
    ],
)
def test_a_certificate_says_how_good_a_plan_is(made, words):
    assert str(made) == words


def test_a_plan_that_streams_nothing_is_optimal():
    made = certified([2, 2, 2], {"cuda:0": 6, "cpu": 9})
    assert (made.verdict, made.offloaded_bytes, made.least_offloaded_bytes) == (Verdict.OPTIMAL, 0, 0)


@pytest.mark.parametrize("limits", [{"cuda:0": 6, "cpu": 9}, {"cuda:0": 6}, {"cpu": 5}])
def test_a_plan_at_its_bound_is_optimal_whichever_policy_made_it(limits):
    for policy in set(Policy) - {Policy.STREAMED}:  # which streams everything, because it is asked to
        assert certified([2, 2, 2, 2], limits, policy).verdict is Verdict.OPTIMAL


def test_a_plan_that_streams_more_than_the_bound_is_bounded_by_it():
    # cuda:0 keeps 4 of 8 for a block of 4, and the first of 3 is all that fits in order; a 1 would fit too.
    made = certified([3, 4, 4, 1], {"cuda:0": 8, "cpu": 20}, Policy.SEQUENTIAL)
    assert (made.verdict, made.offloaded_bytes, made.least_offloaded_bytes) == (Verdict.BOUNDED, 9, 5)
    assert certified([3, 4, 4, 1], {"cuda:0": 8, "cpu": 20}).offloaded_bytes < 9


def test_without_accelerators_what_is_on_disk_is_what_is_offloaded():
    made = certified([2, 2, 2, 2], {"cpu": 5})
    assert (made.offloaded_bytes, made.disk_bytes, made.least_disk_bytes) == (6, 6, 6)


def test_no_units_have_a_certificate_too():
    assert certified([], {"cuda:0": 5}) == Certificate(
        verdict=Verdict.OPTIMAL,
        offloaded_bytes=0,
        least_offloaded_bytes=0,
        disk_bytes=0,
        least_disk_bytes=0,
        largest_bytes=0,
    )
