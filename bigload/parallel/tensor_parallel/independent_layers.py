"""Independent layers: large layers that are divided one by one, at the price of a collective each.

Tables of embeddings are divided by rows, other layers by their outputs, which are gathered. A weight with several names
is divided in one way or not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from functools import reduce
from operator import or_

from torch import Tensor, nn

from bigload.parallel.tensor_parallel.layer_kinds import LayerKind
from bigload.parallel.tensor_parallel.plan import PartialPlan
from bigload.planning.tensor_parallel.division import Division, chunks
from bigload.planning.tensor_parallel.ruled_layers import generic_name

MIN_SHARE = 0.01
"""Of the numbers of a model: layers of one name that have less than this together are not worth a collective."""

_STYLES = {
    LayerKind.LOOKUP: "embedding_rowwise",
    LayerKind.LINEAR: "colwise_gather_output",
    LayerKind.TRANSPOSED: "colwise_gather_output",
}


def names_by_parameter(model: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter of `model`, by each of them."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: group for group in groups.values() for name in group}


def with_ties(plan: PartialPlan, names: Mapping[str, list[str]]) -> PartialPlan:
    """Return `plan` with the divisions of parameters under all of their names."""
    spread = {other: division for name, division in plan.divisions.items() for other in names.get(name, (name,))}
    return plan | PartialPlan(divisions=spread)


def with_independent_layers(
    model: nn.Module,
    layers: Mapping[str, LayerKind],
    called: Set[str] | None,
    plan: PartialPlan,
    *,
    size: int,
    works: Callable[[PartialPlan], bool],
) -> PartialPlan:
    """Return `plan` and what can be divided besides among `size` ranks, kind by kind, as far as it `works`.

    `called` are the layers that a forward calls, `None` if that is not known: a weight that code reads past its layer
    is no layer's to divide. Names of one weight of which some stay whole make all of them whole.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ties = names_by_parameter(model)
    additions: list[PartialPlan] = []
    whole: set[str] = set()
    for kind in _groups(parameters, ties, layers):
        group = [
            first
            for first in kind
            if not all(name in plan.divisions and name.rpartition(".")[0] in plan.styles for name in ties[first])
        ]
        names = {name for first in group for name in ties[first]}
        owners = {name.rpartition(".")[0] for name in names}
        known = {name: plan.divisions[name] for name in names if name in plan.divisions}
        addition = _addition(group, ties, parameters, layers, known, size=size)
        if group and addition is not None and (called is None or owners & called):
            additions.append(addition)
        elif known:
            whole |= owners
    plan = without_owners(plan, whole)
    together = reduce(or_, additions, plan)
    if works(together):
        return together
    for addition in additions:
        if works(plan | addition):
            plan |= addition
        else:
            plan = without_owners(plan, addition.styles)
    return plan


def with_siblings(
    model: nn.Module, layers: Mapping[str, LayerKind], called: Collection[str], plan: PartialPlan
) -> PartialPlan:
    """Return `plan` with layers that no forward called, experts that had nothing to do, divided as their siblings."""
    shapes = {name: tuple(model.get_parameter(f"{name}.weight").shape) for name in layers}
    styled = {(generic_name(name), shapes[name]): name for name in plan.styles if name in layers and name in called}
    for name in layers:
        sibling = styled.get((generic_name(name), shapes[name]))
        if sibling is None or name in called or name in plan.styles:
            continue
        leaves = [leaf for leaf in ("weight", "bias") if f"{sibling}.{leaf}" in plan.divisions]
        plan |= PartialPlan(
            divisions={f"{name}.{leaf}": plan.divisions[f"{sibling}.{leaf}"] for leaf in leaves},
            styles={name: plan.styles[sibling]},
        )
    return plan


def _groups(
    parameters: Mapping[str, Tensor], ties: Mapping[str, list[str]], layers: Mapping[str, LayerKind]
) -> list[list[str]]:
    """Return the first names of the large weights of layers, those of one generic name together.

    A model that is itself a layer stays whole: names of what it has are not below its own.
    """
    by_kind: dict[str, list[str]] = {}
    for name in parameters:
        path, _, leaf = name.rpartition(".")
        if leaf == "weight" and path and path in layers and ties[name][0] == name:
            by_kind.setdefault(generic_name(name), []).append(name)
    firsts = {names[0]: parameters[names[0]].numel() for names in ties.values()}
    sizes = Counter({kind: sum(firsts[name] for name in names) for kind, names in by_kind.items()})
    return [by_kind[kind] for kind in by_kind if sizes[kind] >= MIN_SHARE * sum(firsts.values())]


def _addition(
    group: list[str],
    ties: Mapping[str, list[str]],
    parameters: Mapping[str, Tensor],
    layers: Mapping[str, LayerKind],
    known: Mapping[str, Division],
    *,
    size: int,
) -> PartialPlan | None:
    """Return how the weights of `group` are divided each by itself, `None` if they cannot be."""
    divisions: dict[str, Division] = {}
    styles: dict[str, str] = {}
    for first in group:
        owners = [name.rpartition(".")[0] for name in ties[first]]
        if not all(owner in layers for owner in owners):
            return None
        dims = {
            layers[owner].in_dim if layers[owner] is LayerKind.LOOKUP else layers[owner].out_dim for owner in owners
        }
        length = parameters[first].shape[min(dims)]
        division = Division(min(dims), chunks(length, size))
        if (
            len(dims) > 1
            or 0 in map(division.length, range(size))
            or any(known.get(name, division) != division for name in ties[first])
        ):
            return None
        for name, owner in zip(ties[first], owners, strict=True):
            divisions[name] = division
            styles[owner] = _STYLES[layers[owner]]
            bias = f"{owner}.bias"
            if bias in parameters:
                divisions |= dict.fromkeys(ties[bias], Division(0, division.ranges))
    return PartialPlan(divisions=divisions, styles=styles)


def without_owners(plan: PartialPlan, owners: Collection[str]) -> PartialPlan:
    """Return `plan` with the layers `owners` whole."""
    return PartialPlan(
        divisions={name: value for name, value in plan.divisions.items() if name.rpartition(".")[0] not in owners},
        styles={name: value for name, value in plan.styles.items() if name not in owners},
        attributes=plan.attributes,
        arguments=plan.arguments,
    )
