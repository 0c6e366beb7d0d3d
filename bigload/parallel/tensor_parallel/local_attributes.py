"""Local attributes: counts of heads and widths that modules remember, and that change once their layers are divided.

They are found by trying: coupled layers run as one rank has them, and all their inputs must be the
rank's part of what they would get undivided. Attributes that are called heads are tried first and together, so that
code which this forward does not reach (caches, say) finds them right as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from inspect import signature
from itertools import combinations, islice
from operator import or_
from typing import Any

from torch import Tensor, nn

from bigload.parallel.tensor_parallel.coupled_layers import CoupledLayers
from bigload.parallel.tensor_parallel.plan import LocalArgument, PartialPlan
from bigload.parallel.tensor_parallel.validation import ReferenceRun, misfit

_MAX_TRIES = 60
_HEADS = re.compile(r"heads?$")
_WIDTHS = ("embed_dim", "split_size", "all_head_size", "inner_dim")
"""Attribute names of the total width of all heads; other attributes have them as well."""

_Changes = Mapping[str, int]


def localised(
    reference: ReferenceRun, decided: PartialPlan, kind: Sequence[CoupledLayers], size: int
) -> PartialPlan | None:
    """Return the plan of coupled layers of one `kind`, with their local attributes; `None` if it cannot work.

    `decided` is the plan of what is divided besides. Only the first two are tried.
    """
    base = reduce(or_, (coupled.plan for coupled in kind))
    whole, until = decided | base, kind[:2][-1].row
    module = reference.weightless.module
    owners = [_owners(module, coupled) for coupled in kind]
    candidates = _candidates(module, owners, _ratios(module, kind[0], size))
    heads = {place: value for place, value in candidates.items() if _is_heads(place[1])}
    for changes in islice(_tries(candidates), _MAX_TRIES):
        addition = PartialPlan(attributes=_spread(owners, changes))
        if misfit(reference, whole | addition, size, until) is None:
            return base | addition
    attributes = PartialPlan(attributes=_spread(owners, {place: values[0] for place, values in heads.items()}))
    for arguments in _arguments(reference, owners, heads):
        addition = attributes | PartialPlan(arguments=arguments)
        if misfit(reference, whole | addition, size, until) is None:
            return base | addition
    return None


_AttributeKey = tuple[str, str]
"""A module, by its name below the smallest one that has all coupled layers, and an attribute."""


def _owners(module: nn.Module, coupled: CoupledLayers) -> dict[str, str]:
    """Return the modules whose code coupled layers run in: names below the one that has all, and full names."""
    parts = [name.split(".") for name in (coupled.row, *coupled.columns)]
    depth = next(
        (depth for depth in range(min(map(len, parts))) if len({tuple(part[: depth + 1]) for part in parts}) > 1), 0
    )
    while depth and isinstance(module.get_submodule(".".join(parts[0][:depth])), (nn.ModuleList, nn.ModuleDict)):
        depth -= 1
    return {".".join(part[depth:stop]): ".".join(part[:stop]) for part in parts for stop in range(depth, len(part))}


def _ratios(module: nn.Module, coupled: CoupledLayers, size: int) -> list[Fraction]:
    """Return by what numbers may shrink: with queries, with keys that ranks share, with the quotient of both."""
    shares = {Fraction(1, number) for number in range(2, size + 1) if size % number == 0}
    for name in coupled.columns:
        division = coupled.plan.divisions[f"{name}.weight"]
        weight = module.get_submodule(name)._parameters["weight"]
        assert weight is not None
        assert division.dim is not None
        shares.add(Fraction(sum(stop - start for start, stop in division.ranges[0]), weight.shape[division.dim]))
    shares |= {one / other for one in shares for other in shares if one < other}
    return sorted(shares)


def _candidates(
    module: nn.Module, owners: Sequence[Mapping[str, str]], ratios: Sequence[Fraction]
) -> dict[_AttributeKey, list[int]]:
    """Return which numbers might shrink, and to what."""
    candidates = {}
    for path in owners[0]:
        found = [vars(module.get_submodule(names[path])) for names in owners if path in names]
        for name, value in found[0].items():
            if type(value) is not int or value < 2 or name.startswith("_") or name.endswith("_idx"):
                continue
            local = [int(value * ratio) for ratio in ratios if (value * ratio).denominator == 1]
            if local and len(found) == len(owners) and all(numbers.get(name) == value for numbers in found):
                candidates[path, name] = local
    return candidates


def _is_heads(name: str) -> bool:
    return _HEADS.search(name) is not None


def _tries(candidates: Mapping[_AttributeKey, list[int]]) -> Iterator[dict[_AttributeKey, int]]:
    known = {place: values[0] for place, values in candidates.items() if _is_heads(place[1]) or place[1] in _WIDTHS}
    if any(_is_heads(name) for _, name in known):
        yield known
    yield {}
    choices = [(place, value) for place, values in candidates.items() for value in values]
    choices.sort(key=lambda choice: choice[0] not in known)
    for number in range(1, 5):
        for chosen in combinations(choices, number):
            if len(dict(chosen)) == number:
                yield dict(chosen)
                if not known.keys() <= dict(chosen).keys():
                    yield known | dict(chosen)


def _spread(owners: Sequence[Mapping[str, str]], changes: Mapping[_AttributeKey, int]) -> dict[str, int]:
    """Return `changes` for all coupled layers of the kind, by qualified names."""
    return {f"{names[path]}.{name}".lstrip("."): value for names in owners for (path, name), value in changes.items()}


def _arguments(
    reference: ReferenceRun,
    owners: Sequence[Mapping[str, str]],
    heads: Mapping[_AttributeKey, list[int]],
) -> Iterator[dict[str, tuple[LocalArgument, ...]]]:
    """Yield arguments of modules that may have a part for each head, for all coupled layers of the kind."""
    model = reference.weightless.module
    given = _given(reference, model.get_submodule(owners[0][""]))
    counts = sorted({getattr(model.get_submodule(owners[0][path]), name) for path, name in heads})
    for name, value in given.items():
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        for dim, length in enumerate(value.shape):
            for count in counts:
                if length % count == 0:
                    argument = LocalArgument(name=name, dim=dim, count=count)
                    yield {names[""]: (argument,) for names in owners}


def _given(reference: ReferenceRun, module: nn.Module) -> dict[str, Any]:
    """Return the arguments of the first call of `module` in a forward."""
    found: list[dict[str, Any]] = []

    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(dict(signature(module.forward).bind_partial(*args, **kwargs).arguments))

    with module.register_forward_pre_hook(keep, with_kwargs=True):
        reference.weightless.run(reference.example, lambda _name, _number, _inputs, noise: noise())
    return found[0] if found else {}
