"""The steps from a model to its tensor-parallel plan: words first, then what flows where, then what is left."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

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
)
from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from bigload.parallel.tensor_parallel.local_attributes import localised
from bigload.parallel.tensor_parallel.partial_plan import PartialPlan
from bigload.parallel.tensor_parallel.plan import PlanSource, TensorParallelPlan
from bigload.parallel.tensor_parallel.rule_plans import drafts_of_words, has_divisible_heads, own_words
from bigload.parallel.tensor_parallel.validation import ReferenceRun, misfit, run_reference
from bigload.parallel.tensor_parallel.weightless_model import WeightlessModel
from bigload.planning.plan import PlanNote
from bigload.planning.tensor_parallel.division import WHOLE, Division
from bigload.planning.tensor_parallel.ruled_layers import generic_name
from bigload.units import counted


def drafted(
    model: nn.Module,
    size: int,
    words: Mapping[str, str],
    numbers: Mapping[str, int],
    example: Mapping[str, object] | None,
) -> TensorParallelPlan:
    """Return the plan of `size` ranks for `model`: `words` of the caller and his local `numbers`, or the model's words.

    Raises:
        PartitionError: what the caller says cannot be.
    """
    if size == 1:
        return _plan(model, PartialPlan(), _Stage(size=1, layers={}, ties=names_by_parameter(model)), "inferred")
    asked = _asked(model, words, numbers, size)
    own = {} if words else own_words(model)
    said = [found for _, found in drafts_of_words(model, own, size) if isinstance(found, PartialPlan)]
    summed = [name for draft in (asked, *said) for name, style in draft.styles.items() if style == "moe_tp_experts"]
    stage = _Stage.of(model, size, example, summed)
    draft = _with_words(stage, model, own, _suited(stage, asked))
    source: PlanSource = "custom" if words else "tp_plan" if draft.styles else "inferred"
    draft, shared = _with_regions(stage, draft)
    draft = with_siblings(model, stage.layers, stage.called, draft) if stage.called is not None else draft
    left = {name: kind for name, kind in stage.layers.items() if name not in shared}
    draft = with_independent_layers(model, left, stage.called, draft, size=size, works=stage.fits)
    return _plan(model, draft, stage, source)


def _asked(model: nn.Module, words: Mapping[str, str], numbers: Mapping[str, int], size: int) -> PartialPlan:
    asked = PartialPlan(attributes=numbers)
    for _, found in drafts_of_words(model, words, size):
        if isinstance(found, PartitionError):
            raise found
        asked |= found
    return asked


def _suited(stage: _Stage, asked: PartialPlan) -> PartialPlan:
    """Return `asked` with the numbers that become local by it, where it does not work without.

    Raises:
        PartitionError: it does not work with them either.
    """
    if stage.misfit(asked) is None or stage.weightless is None or stage.reference is None:
        return asked
    for kind in _kinds(stage, ()):
        drafts = [region.draft for region in kind]
        if all(draft.divisions.items() <= asked.divisions.items() for draft in drafts):
            found = localised(stage.weightless, stage.reference, PartialPlan(), kind, stage.size)
            asked = asked if found is None else found | asked
    problem = stage.misfit(asked)
    if problem is not None:
        raise PartitionError(
            f"the policies do not suit this model on {stage.size} ranks",
            details=[problem],
            hint="divide all layers between those that are gathered or summed, or none of them",
        )
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """Where drafts are tried: a model without weights and a forward of it, or nothing, where it does not run."""

    size: int
    layers: Mapping[str, LayerKind]
    ties: Mapping[str, list[str]]
    weightless: WeightlessModel | None = None
    reference: ReferenceRun | None = None
    problem: str | None = None
    tried: list[tuple[PartialPlan, str | None]] = field(default_factory=list)

    @staticmethod
    def of(model: nn.Module, size: int, example: Mapping[str, object] | None, summed: list[str]) -> _Stage:
        ties = names_by_parameter(model)
        inputs = example_inputs(model) if example is None else example
        problem = "it is not known what a forward takes: give an example"
        if inputs:
            try:
                weightless = WeightlessModel(model, is_short=example is None)
                reference = run_reference(weightless, inputs, summed)
                return _Stage(
                    size=size, layers=weightless.layers, ties=ties, weightless=weightless, reference=reference
                )
            except Exception as error:  # of the model's own code
                problem = f"a forward fails: {type(error).__name__}: {error}"
        kinds = {name: layer_kind(module) for name, module in model.named_modules()}
        layers = {name: kind for name, kind in kinds.items() if kind is not None}
        return _Stage(size=size, layers=layers, ties=ties, problem=problem)

    @property
    def called(self) -> set[str] | None:
        return None if self.reference is None else {name for name, _ in self.reference.inputs}

    def misfit(self, draft: PartialPlan) -> str | None:
        if self.weightless is None or self.reference is None:
            return None
        draft = with_ties(draft, self.ties)
        if not self.tried or self.tried[-1][0] != draft:  # the last one is often asked for twice
            self.tried.append((draft, misfit(self.weightless, self.reference, draft, self.size)))
        return self.tried[-1][1]

    def fits(self, draft: PartialPlan) -> bool:
        return self.misfit(draft) is None


def _with_words(stage: _Stage, model: nn.Module, words: Mapping[str, str], draft: PartialPlan) -> PartialPlan:
    """Return `draft` and what the model says of itself, block by block, as far as it works with so many ranks."""
    blocks: dict[str, PartialPlan] = {}
    refused = set()
    for name, found in drafts_of_words(model, words, stage.size):
        if isinstance(found, PartialPlan):
            blocks[_block(name)] = blocks.get(_block(name), PartialPlan()) | found
        else:
            refused.add(_block(name))
    if stage.reference is None and not has_divisible_heads(model, stage.size):
        refused |= {block for block in blocks if "attn" in block or "attention" in block}
    good = [block for name, block in blocks.items() if name not in refused]
    together = draft
    for block in good:
        together |= block
    if stage.fits(together):
        return together
    for block in good:
        if stage.fits(draft | block):
            draft |= block
    return draft


def _block(name: str) -> str:
    """Return the generic name of the part of a layer that `name` is in: `model.layers.*.mlp`, say."""
    before, star, after = generic_name(name).rpartition("*.")
    return before + star + (after.partition(".")[0] if star else after)


def _with_regions(stage: _Stage, draft: PartialPlan) -> tuple[PartialPlan, set[str]]:
    """Return `draft` and the regions of layers that can be divided besides, and the layers that have to stay whole."""
    if stage.weightless is None or stage.reference is None:
        return draft, set()
    accepted: list[tuple[PartialPlan, list[CoupledLayers]]] = []
    together = draft
    for kind in _kinds(stage, draft.styles.keys()):
        if not any(name in together.styles for region in kind for name in (region.row, *region.columns)):
            found = localised(stage.weightless, stage.reference, together, kind, stage.size)
            if found is not None:
                accepted.append((found, kind))
                together |= found
    if not stage.fits(together):
        good, together = [], draft
        for found, kind in accepted:
            if stage.fits(together | found):
                good.append((found, kind))
                together |= found
        accepted = good
    return together, {name for _, kind in accepted for region in kind for name in region.shared}


def _kinds(stage: _Stage, styled: Collection[str]) -> list[list[CoupledLayers]]:
    """Return the regions besides what is `styled`, those together whose names differ in numbers only."""
    assert stage.weightless is not None
    assert stage.reference is not None
    kinds: dict[object, list[CoupledLayers]] = {}
    for region in coupled_layers(stage.weightless, stage.reference, stage.size, styled):
        if not any(name in styled for name in region.columns):
            kinds.setdefault((generic_name(region.row), frozenset(map(generic_name, region.columns))), []).append(
                region
            )
    return list(kinds.values())


def _plan(model: nn.Module, draft: PartialPlan, stage: _Stage, source: PlanSource) -> TensorParallelPlan:
    draft = with_ties(draft, stage.ties)
    problem = stage.misfit(draft)
    if problem is not None:
        raise PartitionError(f"no way is known to divide {type(model).__name__}", details=[problem])
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    divisions = {name: draft.divisions.get(name, WHOLE) for name in shapes}
    return TensorParallelPlan(
        size=stage.size,
        source=source,
        shapes=shapes,
        divisions=divisions,
        styles=dict(draft.styles),
        attributes=dict(draft.attributes),
        arguments=dict(draft.arguments),
        notes=tuple(_notes(stage, shapes, divisions, draft)),
    )


def _notes(
    stage: _Stage, shapes: Mapping[str, tuple[int, ...]], divisions: Mapping[str, Division], draft: PartialPlan
) -> Iterator[PlanNote]:
    if stage.problem is not None:
        yield PlanNote(code="unproven", text=f"the plan was not tried before use: {stage.problem}")
    firsts = {names[0] for names in stage.ties.values()}
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
        {generic_name(name) for name, style in draft.styles.items() if style in _COSTLY and "*" in generic_name(name)}
    )
    if gathered:
        text = f"{counted(len(gathered), 'kind')} of layers divided one by one, each with a collective: "
        yield PlanNote(code="gathered", text=text + ", ".join(gathered))
    shared = sorted({generic_name(name) for name, division in divisions.items() if _is_shared(division)})
    if shared:
        yield PlanNote(code="shared-heads", text=f"ranks have parts in common of {', '.join(shared)}")


_COSTLY = ("colwise_gather_output", "rowwise_split_input")


def _is_shared(division: Division) -> bool:
    """Return whether two ranks hold the same elements."""
    ranges = sorted(pair for of_rank in division.ranges for pair in of_rank)
    return any(stop > start for (_, stop), (start, _) in pairwise(ranges))
