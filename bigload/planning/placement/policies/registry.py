"""The code of every policy. A new policy is a file in this folder, a name in `policy.py` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from bigload.planning.choices import Policy
from bigload.planning.placement.policies.balanced import place_balanced, place_balanced_low_0
from bigload.planning.placement.policies.optimal import place_optimally
from bigload.planning.placement.policies.sequential import place_sequentially
from bigload.planning.placement.problem import Misfit, Placement, PlacementPolicy, PlacementProblem, fetch_ahead

POLICIES: Mapping[Policy, PlacementPolicy] = MappingProxyType(
    {
        Policy.OPTIMAL: place_optimally,
        Policy.SEQUENTIAL: place_sequentially,
        Policy.BALANCED: place_balanced,
        Policy.BALANCED_LOW_0: place_balanced_low_0,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """A placement and the problem it answers: the one asked, or the same without accelerators that cannot run it."""

    problem: PlacementProblem
    placement: Placement


def solve(problem: PlacementProblem, policy: Policy) -> Solution | Misfit:
    """Place units by a policy, with a second unit in flight where there is room for it.

    Accelerators that cannot even take what is streamed through them stay unused when RAM can run the model.
    """
    found = POLICIES[policy](problem)
    if isinstance(found, Misfit) and problem.accelerators and problem.budget.has_cpu:
        without = replace(problem, budget=problem.budget.without_accelerators())
        on_cpu = POLICIES[policy](without)
        if isinstance(on_cpu, Placement):
            problem, found = without, on_cpu
    if isinstance(found, Misfit):
        return found
    return Solution(problem=problem, placement=fetch_ahead(problem, found))
