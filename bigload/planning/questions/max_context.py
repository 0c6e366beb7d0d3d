"""The largest context that the memory of a budget holds.

What a longer context needs, on any device, is never less: caches, logits and activations only grow with it. So a
placement for a context does for all shorter ones, the least cost of a token never falls as the context grows, and both
questions are answered by halving over tokens. That holds for the exact policy; a policy that does not look back may, at
some shorter context, do worse than at the one found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from bigload.errors import DoesNotFitError
from bigload.planning.advice import does_not_fit
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Balance, Policy
from bigload.planning.model.run_memory import RunMemory
from bigload.planning.model.structure import ModelStructure
from bigload.planning.options import PlanOptions
from bigload.planning.placement.policies.contiguous_ranges import RangeSearch
from bigload.planning.placement.policies.optimal import orders_of, token_cost
from bigload.planning.placement.problem import Misfit, Placement, PlacementProblem
from bigload.planning.placement.solve import place_by, solve
from bigload.planning.planner import expert_forms, problem_of
from bigload.planning.policy_registry import policy_named
from bigload.planning.workload import MAX_CONTEXT
from bigload.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxContext:
    """The most tokens of each of `batch` sequences that a budget holds.

    Attributes:
        batch: Sequences that are run together.
        unslowed_tokens: With them a token takes no more bytes from RAM and disk than with a context of 0, above all
            none where nothing is offloaded; `None` for no limit, 0 where not even one token finds room.
        most_tokens: With them there is a plan at all, whatever it streams; `None` and 0 as above.
        is_offloaded: Whether weights are off the accelerators (on disk, without accelerators) at a context of 0.
        grows: Whether a longer context takes more memory, however long it is.
        trained_tokens: What the config says that the model was made for; `None` where it says nothing.
        unknown: Sentences on what is not counted because neither names nor config tell.
    """

    batch: int
    unslowed_tokens: int | None
    most_tokens: int | None
    is_offloaded: bool
    grows: bool
    trained_tokens: int | None
    unknown: tuple[str, ...]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what else there is to say, a sentence each."""
        return tuple(self._remarks())

    def _remarks(self) -> Iterator[str]:
        if self.most_tokens is None:
            reason = f"only {MAX_CONTEXT} tokens were tried" if self.grows else "a longer one takes no more memory"
            yield f"there is no limit to the context: {reason}"
        trained = self.trained_tokens
        if trained is not None and (self.most_tokens is None or trained < self.most_tokens):
            yield f"the config says that the model was made for {counted(trained, 'token')}"
        yield from self.unknown

    def __str__(self) -> str:
        of_each = f" for each of {self.batch} sequences" if self.batch > 1 else ""
        if self.most_tokens == 0:
            return f"no context fits: there is no room for one token{of_each} beside the weights"
        slower = "when more is streamed" if self.is_offloaded else "with offload"
        if self.unslowed_tokens == 0:
            return f"largest context: {_written(self.most_tokens)}{of_each}, {slower}; none without"
        if self.unslowed_tokens == self.most_tokens:
            return f"largest context: {_written(self.most_tokens)}{of_each}"
        how = "as fast as without a cache" if self.is_offloaded else "without offload"
        return (
            f"largest context{of_each}: {_written(self.unslowed_tokens)} {how}; {_written(self.most_tokens)} {slower}"
        )


def _written(tokens: int | None) -> str:
    return "no limit" if tokens is None else counted(tokens, "token")


def max_context(structure: ModelStructure, budget: MemoryBudget, options: PlanOptions) -> MaxContext:
    """Return the largest contexts for `options.workload.batch` sequences; its `context` does not matter.

    A plan in which the cpu runs the model and accelerators stay unused counts only where that is so at a context of 0.
    """
    probe = _Probe(structure, budget, options)
    base = probe.cost(0)
    if base is None:
        raise probe.does_not_fit()
    most = _most(MAX_CONTEXT, partial(probe.is_possible, may_stay_unused=base[0]))
    unslowed = _most(most, partial(probe.is_within, limit=base))
    return MaxContext(
        batch=options.workload.batch,
        unslowed_tokens=None if unslowed == MAX_CONTEXT else unslowed,
        most_tokens=None if most == MAX_CONTEXT else most,
        is_offloaded=base > (False, 0),
        grows=probe.needs(MAX_CONTEXT) != probe.needs(MAX_CONTEXT // 2),
        trained_tokens=structure.config.count("trained_context"),
        unknown=probe.needs(1).unknown,
    )


_Cost = tuple[bool, int]
"""Whether accelerators stay unused, and what a token costs, in the unit of `memory_tiers.Host`."""


def _most(highest: int, is_enough: Callable[..., bool]) -> int:
    """Return the most tokens up to `highest` with which `is_enough(tokens, thorough=...)` is true; at 0 it is.

    Quick answers are never wrong when they say yes. They lead near the end, and the thorough ones begin there.
    """

    def most(low: int, *, thorough: bool) -> int:
        return bisect_left(range(highest), x=True, lo=low, key=lambda n: not is_enough(n + 1, thorough=thorough))

    found = most(0, thorough=False)
    if found == highest or not is_enough(found + 1, thorough=True):
        return found
    return most(found + 1, thorough=True)


class _Probe:
    """One model and budget, asked for several contexts."""

    def __init__(self, structure: ModelStructure, budget: MemoryBudget, options: PlanOptions) -> None:
        self.structure, self.budget, self.options = structure, budget, options
        self.forms = tuple(expert_forms(structure, options))

    def options_at(self, context: int) -> PlanOptions:
        return replace(self.options, workload=replace(self.options.workload, context=context), balance=Balance.FILL)

    def needs(self, context: int) -> RunMemory:
        return self.structure.memory.at(self.options_at(context).workload)

    def is_possible(self, context: int, *, may_stay_unused: bool, thorough: bool) -> bool:
        """Return whether there is a plan, one that uses accelerators unless these `may_stay_unused`."""
        costs = self._costs(context, may_stay_unused=may_stay_unused, thorough=thorough)
        return next(costs, None) is not None

    def is_within(self, context: int, *, limit: _Cost, thorough: bool) -> bool:
        """Return whether there is a plan that costs no more than `limit`."""
        if limit == (False, 0) and policy_named(self.options.policy).is_exact and self.budget.accelerators:
            return _all_held(self._problem(context, apart=False))
        return any(cost <= limit for cost in self._costs(context, may_stay_unused=limit[0], thorough=thorough))

    def cost(self, context: int) -> _Cost | None:
        """Return the cost of the best plan, `None` where there is none."""
        return min(self._costs(context, may_stay_unused=True, thorough=True), default=None)

    def does_not_fit(self) -> DoesNotFitError:
        """Return the error that says what is short at a context of 0, where there is no plan."""
        misfit = solve(self._problem(0, apart=self.forms[0]), self.options.policy)
        assert isinstance(misfit, Misfit), "a plan was found before"
        name = self.structure.checkpoint.name
        return does_not_fit(name, self._problem(0, apart=False), misfit, self.options.policy)

    def _problem(self, context: int, *, apart: bool) -> PlacementProblem:
        return problem_of(self.structure, self.budget, self.options_at(context), split_experts=apart)

    def _costs(self, context: int, *, may_stay_unused: bool, thorough: bool) -> Iterator[_Cost]:
        """Yield what plans cost, with experts in their blocks and apart."""
        for apart in self.forms:
            problem = self._problem(context, apart=apart)
            found = _placed(problem, self.options.policy, thorough=thorough)
            if found is not None:
                yield False, found
            elif may_stay_unused and problem.accelerators:
                without = replace(problem, budget=self.budget.without_accelerators())
                found = _placed(without, self.options.policy, thorough=thorough) if self.budget.has_cpu else None
                if found is not None:
                    yield True, found


def _placed(problem: PlacementProblem, policy: str, *, thorough: bool) -> int | None:
    """Return what a token costs, `None` without a placement; the exact policy may be asked to be quick."""
    if policy_named(policy).is_exact and not thorough:
        return _quickly_placed(problem)
    found = place_by(policy, problem)
    return token_cost(problem, found) if isinstance(found, Placement) else None


def _quickly_placed(problem: PlacementProblem) -> int | None:
    search = RangeSearch(problem)
    found = [best.cost for rooms in orders_of(problem) if (best := search.best(rooms)) is not None]
    if not any(unit.is_routed for unit in problem.units):
        filled = place_by(Policy.SEQUENTIAL, problem)
        found += [token_cost(problem, filled)] if isinstance(filled, Placement) else []
    return min(found, default=None)


def _all_held(problem: PlacementProblem) -> bool:
    """Return whether the accelerators hold everything."""
    search = RangeSearch(problem)
    return any(search.starts(rooms)[-1][0] == 0 for rooms in orders_of(problem))
