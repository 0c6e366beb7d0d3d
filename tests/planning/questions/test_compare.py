"""Comparison of several policies on one question."""

import pytest

from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Policy
from bigload.planning.model.structure import read_structure
from bigload.planning.options import options_of
from bigload.planning.planner import plan_details
from bigload.planning.questions.compare import compare
from builders import checkpoint_of

SIZES = {"model.embed_tokens.weight": 2} | {f"model.layers.{i}.a.weight": size for i, size in enumerate([2, 2, 3])}


def compared(sizes, budget, policies, **wishes):
    options = options_of(overhead=0, **wishes)
    structure = read_structure(checkpoint_of(sizes), options)
    return compare(structure, MemoryBudget.of(budget), options, policies)


@pytest.mark.parametrize("policy", Policy)
def test_figures_are_those_of_the_plan_that_the_policy_makes(policy):
    budget = MemoryBudget.of({"cuda:0": 7, "cuda:1": 3, "cpu": 6})
    options = options_of(overhead=0, policy=policy)
    made = plan_details(checkpoint_of(SIZES), budget, options)
    (outcome,) = compare(made.structure, budget, options, [])
    assert outcome.fits
    assert outcome.policy == policy
    gpus = [use for use in made.plan.devices if use.device.is_accelerator]
    assert outcome.accelerator_bytes == sum(use.weights_bytes for use in gpus)
    assert outcome.ram_bytes + outcome.disk_bytes == made.plan.weights_bytes - outcome.accelerator_bytes
    assert outcome.token_seconds == pytest.approx(made.plan.token_seconds)
    assert outcome.num_device_changes == made.plan.num_device_changes
    assert outcome.fullest_share == max(use.used_bytes / use.budget_bytes for use in gpus)
    assert outcome.execution_device == made.plan.execution_device


def test_the_policy_of_the_plan_comes_first_and_none_comes_twice():
    outcomes = compared(SIZES, {"cuda:0": 20}, [Policy.OPTIMAL, Policy.BALANCED, Policy.BALANCED], policy="sequential")
    assert [outcome.policy for outcome in outcomes] == [Policy.SEQUENTIAL, Policy.OPTIMAL, Policy.BALANCED]


def test_the_exact_policy_keeps_more_where_order_is_in_the_way():
    exact, sequential = compared(SIZES, {"cuda:0": 7, "cpu": 20}, [Policy.SEQUENTIAL])
    # Holding 3 and streaming 2 at a time leaves room for one of 2; the sequential policy has to stream 3.
    assert (exact.accelerator_bytes, sequential.accelerator_bytes) == (5, 4)
    assert exact.token_seconds < sequential.token_seconds


def test_a_policy_without_a_plan_says_what_is_short():
    options = options_of(overhead=0)
    structure = read_structure(checkpoint_of(SIZES), options)
    (outcome,) = compare(structure, MemoryBudget.of({"cuda:0": 5}, use_disk=False), options, [])
    assert not outcome.fits
    assert outcome.lacking_bytes > 0


def test_policies_that_know_no_experts_keep_them_with_their_block():
    experts = {f"model.layers.0.mlp.experts.{i}.up.weight": 4 for i in range(2)}
    outcomes = compared({**SIZES, **experts}, {"cuda:0": 12, "cpu": 40}, [Policy.SEQUENTIAL], experts="split")
    assert [outcome.fits for outcome in outcomes] == [True, True]


def test_an_outcome_says_what_is_where_and_how_full_the_fullest_accelerator_is():
    (held,) = compared(SIZES, {"cuda:0": 18}, [])
    assert (held.accelerator_bytes, held.token_seconds, held.num_device_changes, held.fullest_share) == (9, 0, 0, 0.5)
    (on_cpu,) = compared(SIZES, {"cpu": 18}, [])
    assert (on_cpu.ram_bytes, on_cpu.token_seconds, on_cpu.fullest_share) == (9, 0, None)
