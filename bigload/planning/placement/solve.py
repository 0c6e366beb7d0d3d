"""Placement by a policy: what was asked, or the same without accelerators that cannot run the model."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

from bigload.planning.placement.problem import Misfit, Placement, PlacementPolicy, PlacementProblem, fetch_ahead
from bigload.planning.policy_registry import policy_named


class Solution(NamedTuple):
    """A placement and the problem it answers: the one asked, or the same without accelerators that cannot run it."""

    problem: PlacementProblem
    placement: Placement


def place_by(policy: str, problem: PlacementProblem) -> Placement | Misfit:
    """Return the answer of one policy."""
    return cast(PlacementPolicy, policy_named(policy).load())(problem)


def solve(problem: PlacementProblem, policy: str) -> Solution | Misfit:
    """Place units by a policy, with a second unit in flight where there is room for it.

    Accelerators that cannot even take what is streamed through them stay unused when RAM can run the model.
    A policy that `streams_all` is taken at its word in both.
    """
    found, streams_all = place_by(policy, problem), policy_named(policy).streams_all
    if isinstance(found, Misfit) and not streams_all and problem.accelerators and problem.budget.has_cpu:
        without = replace(problem, budget=problem.budget.without_accelerators())
        on_cpu = place_by(policy, without)
        if isinstance(on_cpu, Placement):
            problem, found = without, on_cpu
    if isinstance(found, Misfit):
        return found
    return Solution(problem=problem, placement=found if streams_all else fetch_ahead(problem, found))
