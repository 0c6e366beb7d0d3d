"""Planner of tensor parallelism: rules first, then what the data flow of a forward shows, then layers one by one.

1. The caller's rules. They have to fit.
2. The rules of the model's family, those by which `bigload reshard` divides its checkpoint: a plan and a folder of
   ranks then agree. Before the model's own plan, because they respect heads that ranks share, fused matrices, and
   attention and experts that transformers' plans leave whole (`tests/conformance/test_partition.py` lists them).
3. The model's own tensor-parallel plan (`tp_plan`), for families without rules and blocks whose rules do not fit.
4. Coupled layers, found by the gradients of a forward without weights.
5. Large layers that are left, each with a collective of its own.

Every step is validated by forwards without weights as the first and the last rank, and dropped block by block where it
does not fit. Counts of heads that modules remember are made local where a forward needs it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_

from torch import nn

from bigload.errors import PartitionError
from bigload.parallel.tensor_parallel.coupled_layers import CoupledLayers, coupled_layers
from bigload.parallel.tensor_parallel.example_inputs import example_inputs
from bigload.parallel.tensor_parallel.independent_layers import (
    MIN_SHARE,
    names_by_parameter,
    with_independent_layers,
    with_siblings,
    with_ties,
    without_owners,
)
from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from bigload.parallel.tensor_parallel.local_attributes import localised
from bigload.parallel.tensor_parallel.plan import PartialPlan, PlanSource, TensorParallelPlan
from bigload.parallel.tensor_parallel.rule_plans import config_of, own_rules, rule_plans
from bigload.parallel.tensor_parallel.validation import ReferenceRun, misfit, run_reference
from bigload.parallel.tensor_parallel.weightless_model import WeightlessModel
from bigload.planning.plan import PlanNote
from bigload.planning.tensor_parallel.division import WHOLE, Division
from bigload.planning.tensor_parallel.layer_division import LayerDivider
from bigload.planning.tensor_parallel.ruled_layers import ModelRules, generic_name
from bigload.planning.tensor_parallel.rules import Rule
from bigload.units import counted

_SUMMED = ("moe_tp_experts", "moe_ep_experts")

_Kind = list[CoupledLayers]
"""Coupled layers whose names differ in numbers only."""


def make_plan(
    model: nn.Module,
    size: int,
    rules: tuple[Rule, ...],
    attributes: Mapping[str, int],
    example: Mapping[str, object] | None,
) -> TensorParallelPlan:
    """Return the plan of `size` ranks for `model`: by `rules` and local `attributes` of the caller first."""
    if size == 1:
        return _plan(model, PartialPlan(), _Validator(size=1, layers={}, ties=names_by_parameter(model)), "inferred")
    config = config_of(model)
    custom = ModelRules(config, rules, has_family=False)
    by_source: dict[PlanSource, ModelRules] = {
        "family": ModelRules(config, rules),
        "tp_plan": ModelRules(config, (*rules, *own_rules(model)), has_family=False),
    }

    def found(source: ModelRules, *, needs_heads: bool = False) -> list[tuple[str, PartialPlan | PartitionError]]:
        return list(rule_plans(model, source, LayerDivider(tp=size, needs_heads=needs_heads)))

    asked = PartialPlan(attributes=attributes)
    for _, plan in found(custom):
        if isinstance(plan, PartitionError):
            raise plan
        asked |= plan
    plans = {source: found(of_source) for source, of_source in by_source.items()}
    all_plans = [asked, *(plan for each in plans.values() for _, plan in each if isinstance(plan, PartialPlan))]
    summed = {name for plan in all_plans for name, style in plan.styles.items() if style in _SUMMED}
    validator = _Validator.of(model, size, example, sorted(summed))
    plan = _fitting(validator, asked)
    if validator.reference is None:
        # Nothing shows which attributes a family's rules make local; its own plan is the model's promise of none.
        plans = {"tp_plan": found(by_source["tp_plan"], needs_heads=True)}
    source: PlanSource = "custom" if rules else "inferred"
    for each, of_source in plans.items():
        divided = plan.styles.keys()
        plan = _with_rules(validator, model, of_source, plan)
        source = each if source == "inferred" and plan.styles.keys() > divided else source
    plan, shared = _with_coupled_layers(validator, plan, custom.whole)
    if validator.called is not None:
        plan = with_siblings(model, validator.layers, validator.called, plan)
    left = {name: kind for name, kind in validator.layers.items() if name not in shared | custom.whole}
    plan = with_independent_layers(model, left, validator.called, plan, size=size, works=validator.fits)
    return _plan(model, plan, validator, source)


@dataclass(slots=True, kw_only=True)
class _Validator:
    """Validates partial plans by a forward of a model without weights, unless `problem` says why it does not run."""

    size: int
    layers: Mapping[str, LayerKind]
    ties: Mapping[str, list[str]]
    reference: ReferenceRun | None = None
    problem: str | None = None
    _last: tuple[PartialPlan, str | None] | None = None
    _kinds: list[_Kind] | None = None

    @staticmethod
    def of(model: nn.Module, size: int, example: Mapping[str, object] | None, summed: list[str]) -> _Validator:
        ties = names_by_parameter(model)
        inputs = example_inputs(model) if example is None else example
        problem = "it is not known what a forward takes: give an example"
        if inputs:
            try:
                reference = run_reference(WeightlessModel(model, is_short=example is None), inputs, summed)
                return _Validator(size=size, layers=reference.weightless.layers, ties=ties, reference=reference)
            except Exception as error:  # of the model's own code
                problem = f"a forward fails: {type(error).__name__}: {error}"
        kinds = {name: layer_kind(module) for name, module in model.named_modules()}
        layers = {name: kind for name, kind in kinds.items() if kind is not None}
        return _Validator(size=size, layers=layers, ties=ties, problem=problem)

    @property
    def called(self) -> set[str] | None:
        """The layers that a forward calls."""
        return None if self.reference is None else {name for name, _ in self.reference.inputs}

    def misfit(self, plan: PartialPlan) -> str | None:
        """Return why `plan` does not fit, `None` if it does or cannot be validated."""
        if self.reference is None:
            return None
        plan = with_ties(plan, self.ties)
        if self._last is None or self._last[0] != plan:  # the last one is often asked for twice
            self._last = (plan, misfit(self.reference, plan, self.size))
        return self._last[1]

    def fits(self, plan: PartialPlan) -> bool:
        return self.misfit(plan) is None

    def kinds(self, divided: Collection[str]) -> list[_Kind]:
        """Return the coupled layers besides those that are `divided`, by kind."""
        if self.reference is None:
            return []
        if self._kinds is None:
            found = _by_kind(coupled_layers(self.reference, self.size, divided))
            self._kinds = found if not divided else None
        else:
            found = self._kinds
        return [
            kind for kind in found if not any(name in divided for each in kind for name in (each.row, *each.columns))
        ]

    def with_local_attributes(self, plan: PartialPlan) -> PartialPlan:
        """Return `plan` with the attributes that become local by its divisions of coupled layers."""
        assert self.reference is not None
        for kind in self.kinds(()):
            if all(each.plan.divisions.items() <= plan.divisions.items() for each in kind):
                # With all of its block: gradients do not show queries and keys of which a mask leaves nothing.
                block = _of_block(plan, _block(kind[0].row))
                plan = (localised(self.reference, block, kind, self.size) or PartialPlan()) | plan
        return plan

    def fitted(self, plan: PartialPlan) -> PartialPlan | None:
        """Return `plan`, with local attributes if it needs them to fit; `None` if it does not fit."""
        if self.fits(plan):
            return plan
        plan = self.with_local_attributes(plan)
        return plan if self.fits(plan) else None


def _names(kind: _Kind) -> set[str]:
    """Return the layers of `kind` that are divided by their outputs or inputs."""
    return {name for each in kind for name in (each.row, *each.columns)}


def _of_block(plan: PartialPlan, block: str) -> PartialPlan:
    """Return the divisions and styles of `plan` in the blocks of one generic name."""
    return PartialPlan(
        divisions={name: division for name, division in plan.divisions.items() if _block(name) == block},
        styles={name: style for name, style in plan.styles.items() if _block(name) == block},
    )


def _by_kind(found: Iterable[CoupledLayers]) -> list[_Kind]:
    kinds: dict[object, _Kind] = {}
    for each in found:
        kinds.setdefault((generic_name(each.row), frozenset(map(generic_name, each.columns))), []).append(each)
    return list(kinds.values())


def _fitting(validator: _Validator, asked: PartialPlan) -> PartialPlan:
    """Return the caller's plan `asked`, with local attributes if it needs them."""
    plan = validator.fitted(asked)
    if plan is not None:
        return plan
    problem = validator.misfit(validator.with_local_attributes(asked))
    raise PartitionError(
        f"the policies do not suit this model on {validator.size} ranks",
        details=[problem or ""],
        hint="divide all layers between those that are gathered or summed, or none of them",
    )


def _with_rules(
    validator: _Validator,
    model: nn.Module,
    found: Iterable[tuple[str, PartialPlan | PartitionError]],
    plan: PartialPlan,
) -> PartialPlan:
    """Return `plan` with the partial plans of rules, block by block, as far as they fit and add to it."""
    blocks: dict[str, PartialPlan] = {}
    refused = set()
    for name, addition in found:
        if isinstance(addition, PartitionError):
            refused.add(_block(name))
        elif not addition.styles.keys() & plan.styles.keys():
            blocks[_block(name)] = blocks.get(_block(name), PartialPlan()) | addition
    good = [block for name, block in blocks.items() if name not in refused]
    half_tied = _half_tied(model, validator.ties, reduce(or_, good, plan))
    good = [without_owners(block, half_tied) for block in good]
    together = validator.fitted(reduce(or_, good, plan))
    if together is not None:
        return together
    for block in good:
        plan = validator.fitted(plan | block) or plan
    return plan


def _half_tied(model: nn.Module, ties: Mapping[str, list[str]], plan: PartialPlan) -> set[str]:
    """Return the modules of divided weights that another module holds too, whose forward has no part in `plan`."""
    styled = {id(model.get_submodule(name)) for name in plan.styles}
    half_tied = set()
    divided = [name for name, division in plan.divisions.items() if division != WHOLE]
    for name in divided:
        owners = {other.rpartition(".")[0] for other in ties.get(name, ())}
        if any(id(model.get_submodule(owner)) not in styled for owner in owners):
            half_tied |= owners
    return half_tied


def _block(name: str) -> str:
    """Return the generic name of the part of a layer that `name` is in: `model.layers.*.mlp`, say."""
    before, star, after = generic_name(name).rpartition("*.")
    return before + star + (after.partition(".")[0] if star else after)


def _with_coupled_layers(
    validator: _Validator, plan: PartialPlan, whole: Collection[str]
) -> tuple[PartialPlan, set[str]]:
    """Return `plan` with coupled layers besides, none of those in `whole`, and the layers that have to stay whole."""
    if validator.reference is None:
        return plan, set()
    accepted: list[tuple[PartialPlan, _Kind]] = []
    together = plan
    for kind in validator.kinds(plan.styles.keys()):
        if not _names(kind) & (together.styles.keys() | set(whole)):
            found = localised(validator.reference, together, kind, validator.size)
            if found is not None:
                accepted.append((found, kind))
                together |= found
    if not validator.fits(together):
        good, together = [], plan
        for found, kind in accepted:
            if validator.fits(together | found):
                good.append((found, kind))
                together |= found
        accepted = good
    return together, {name for _, kind in accepted for each in kind for name in each.shared}


def _plan(model: nn.Module, plan: PartialPlan, validator: _Validator, source: PlanSource) -> TensorParallelPlan:
    plan = with_ties(plan, validator.ties)
    problem = validator.misfit(plan)
    if problem is not None:
        raise PartitionError(f"no way is known to divide {type(model).__name__}", details=[problem])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    divisions = {name: plan.divisions.get(name, WHOLE) for name in shapes}
    return TensorParallelPlan(
        size=validator.size,
        source=source,
        shapes=shapes,
        divisions=divisions,
        styles=dict(plan.styles),
        attributes=dict(plan.attributes),
        arguments=dict(plan.arguments),
        notes=tuple(_notes(validator, shapes, divisions, plan)),
    )


def _notes(
    validator: _Validator, shapes: Mapping[str, tuple[int, ...]], divisions: Mapping[str, Division], plan: PartialPlan
) -> Iterator[PlanNote]:
    if validator.problem is not None:
        yield PlanNote(code="unproven", text=f"the plan was not tried before use: {validator.problem}")
    firsts = {names[0] for names in validator.ties.values()}
    total = sum(prod(shapes[name]) for name in firsts)
    whole: dict[str, int] = {}
    for name in firsts:
        if divisions[name].dim is None:
            whole[generic_name(name)] = whole.get(generic_name(name), 0) + prod(shapes[name])
    for kind, numel in sorted(whole.items()):
        if numel >= MIN_SHARE * total:
            text = f"every rank has all of {kind}: {numel / total:.1%} of the model"
            yield PlanNote(code="replicated", text=text)
    gathered = sorted(
        {generic_name(name) for name, style in plan.styles.items() if style in _COSTLY and "*" in generic_name(name)}
    )
    if gathered:
        text = f"{counted(len(gathered), 'kind')} of layers divided one by one, each with a collective: "
        yield PlanNote(code="gathered", text=text + ", ".join(gathered))
    shared = sorted({generic_name(name) for name, division in divisions.items() if division.is_shared})
    if shared:
        yield PlanNote(code="shared-heads", text=f"ranks have parts in common of {', '.join(shared)}")


_COSTLY = ("colwise_gather_output", "rowwise_split_input")
