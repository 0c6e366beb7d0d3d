"""Coupled layers: layers that are divided together, found by the gradients of a weightless forward.

They end in a layer that is divided by its inputs, each rank taking a part of them, and whose outputs are summed.
Gradients show what that part is made of: of the layers before it, each rank needs some outputs only. Queries,
keys and values, fused or apart, gates, shared heads and tables of positions are all found this way, without a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from bigload.parallel.tensor_parallel.layer_kinds import LayerKind
from bigload.parallel.tensor_parallel.plan import PartialPlan
from bigload.parallel.tensor_parallel.validation import ReferenceRun
from bigload.parallel.tensor_parallel.weightless_model import WeightlessModel
from bigload.planning.tensor_parallel.division import Division, Range, chunks
from bigload.planning.tensor_parallel.ruled_layers import generic_name


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledLayers:
    """Layers that are divided together.

    Attributes:
        row: The layer that is divided by its inputs.
        columns: The layers that are divided by their outputs.
        shared: Layers of whose outputs every rank needs all, as of keys that all queries read.
        plan: Their divisions and styles, and those of parameters and tables between them.
    """

    row: str
    columns: tuple[str, ...]
    shared: tuple[str, ...]
    plan: PartialPlan


def coupled_layers(reference: ReferenceRun, size: int, styled: Collection[str] = ()) -> Iterator[CoupledLayers]:
    """Yield what `size` ranks could divide together, besides what is `styled`; some may turn out not to work.

    Of rows whose names differ in numbers only, the first two and the last are looked at. If what was found of the last
    is there for the others, it holds for them.
    """
    weightless, leaves = reference.weightless, _leaves(reference)
    kinds: dict[tuple[str, int], list[str]] = {}
    for (name, number), inputs in reference.inputs.items():
        is_row = number == 0 and name not in styled and weightless.layers[name] is not LayerKind.LOOKUP
        if is_row and inputs.requires_grad and inputs.shape[-1] % size == 0:
            kinds.setdefault((generic_name(name), inputs.shape[-1]), []).append(name)

    def found(name: str) -> CoupledLayers | None:
        return _coupled(weightless, name, reference.inputs[name, 0], leaves, size)

    for rows in kinds.values():
        samples = {name: found(name) for name in (*rows[:2], rows[-1])}
        last = samples[rows[-1]]
        is_uniform = len({None if coupled is None else _form(coupled) for coupled in samples.values()}) == 1
        for name in rows:
            coupled = samples.get(name)
            if name not in samples and (last is not None or not is_uniform):
                coupled = _transferred(weightless, last, name) if is_uniform and last is not None else found(name)
            if coupled is not None:
                yield coupled


def _form(coupled: CoupledLayers) -> frozenset[tuple[str, Division]]:
    return frozenset((generic_name(name), division) for name, division in coupled.plan.divisions.items())


def _transferred(weightless: WeightlessModel, coupled: CoupledLayers, row: str) -> CoupledLayers | None:
    """Return `coupled` for another `row`: with the numbers in that, where names have those of the coupled's row."""
    old, new = coupled.row.split("."), row.split(".")

    def moved(name: str) -> str:
        parts = name.split(".")
        same = next((at for at, (a, b) in enumerate(zip(parts, old, strict=False)) if a != b), len(old))
        return ".".join(new[:same] + parts[same:])

    divisions = {moved(name): division for name, division in coupled.plan.divisions.items()}
    styles = {moved(name): style for name, style in coupled.plan.styles.items()}
    for name, division in divisions.items():
        path, _, last = name.rpartition(".")
        try:
            parameter = weightless.module.get_submodule(path)._parameters.get(last)
        except AttributeError:
            return None
        if parameter is None or division.dim is None or division.dim >= parameter.ndim:
            return None
        if max(stop for of_rank in division.ranges for _, stop in of_rank) != parameter.shape[division.dim]:
            return None
    return CoupledLayers(
        row=row,
        columns=tuple(map(moved, coupled.columns)),
        shared=tuple(map(moved, coupled.shared)),
        plan=PartialPlan(divisions=divisions, styles=styles),
    )


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Beginning of the graph of the reference: the answer of a layer, or a parameter that no layer owns."""

    name: str
    is_layer: bool


def _leaves(reference: ReferenceRun) -> dict[int, _Leaf]:
    leaves = {id(tensor): _Leaf(name, is_layer=True) for (name, _), tensor in reference.answers.items()}
    for name, parameter in reference.weightless.module.named_parameters():
        if parameter.requires_grad:
            leaves[id(parameter)] = _Leaf(name, is_layer=False)
    return leaves


def _coupled(
    weightless: WeightlessModel, row: str, inputs: Tensor, leaves: Mapping[int, _Leaf], size: int
) -> CoupledLayers | None:
    reached = [tensor for tensor in _reached(inputs) if id(tensor) in leaves]
    needed: list[dict[str, list[Tensor]]] = []
    for ((start, stop),) in chunks(inputs.shape[-1], size):
        needed.append(_needed(inputs[..., start:stop], reached, leaves))
        if all(bool(mask.all()) for masks in needed[0].values() for mask in masks):
            return None
    divisions: dict[str, Division] = {}
    styles: dict[str, str] = {}
    columns, shared = [], []
    for name in needed[0]:
        division = _division([masks[name] for masks in needed])
        if division is None:
            return None
        kind = weightless.layers.get(name)
        if division.dim is None:
            shared += [name] if kind is not None else []
            continue
        if kind is None:
            divisions[name] = division
            styles[name.rpartition(".")[0]] = "local_params"
            continue
        divisions[f"{name}.weight"] = Division(kind.out_dim, division.ranges)
        styles[name] = "local_params" if kind is LayerKind.LOOKUP else "colwise"
        if kind is not LayerKind.LOOKUP:
            columns.append(name)
            if weightless.module.get_submodule(name)._parameters.get("bias") is not None:
                divisions[f"{name}.bias"] = Division(0, division.ranges)
    if not columns or row in styles:
        return None
    divisions[f"{row}.weight"] = Division(weightless.layers[row].in_dim, chunks(inputs.shape[-1], size))
    styles[row] = "rowwise"
    plan = PartialPlan(divisions=divisions, styles=styles)
    return CoupledLayers(row=row, columns=tuple(columns), shared=tuple(shared), plan=plan)


def _reached(inputs: Tensor) -> list[Tensor]:
    """Return the leaves of the graph that `inputs` are the end of."""
    assert inputs.grad_fn is not None, "answers are clones of leaves"
    seen, found, left = {inputs.grad_fn}, [], [inputs.grad_fn]
    while left:
        node = left.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return found


def _needed(part: Tensor, reached: list[Tensor], leaves: Mapping[int, _Leaf]) -> dict[str, list[Tensor]]:
    """Return for each leaf, by name, which of its elements along each dimension `part` depends on.

    Of what layers answer, only the last dimension counts.
    """
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(part.shape, generator=generator) + 0.5
    gradients = torch.autograd.grad((part * weights).sum(), reached, retain_graph=True, allow_unused=True)
    needed: dict[str, list[Tensor]] = {}
    for tensor, gradient in zip(reached, gradients, strict=True):
        leaf = leaves[id(tensor)]
        is_used = torch.zeros_like(tensor, dtype=torch.bool) if gradient is None else gradient != 0
        dims = [tensor.ndim - 1] if leaf.is_layer else range(tensor.ndim)
        masks = [is_used.movedim(dim, 0).reshape(tensor.shape[dim], -1).any(1) for dim in dims]
        before = needed.get(leaf.name)
        needed[leaf.name] = masks if before is None else [a | b for a, b in zip(before, masks, strict=True)]
    return needed


def _division(masks: list[list[Tensor]]) -> Division | None:
    """Return along which dimension ranks need different elements, and which; `None` if that is no division."""
    for dim in range(len(masks[0])):
        by_rank = [masks_of_rank[dim] for masks_of_rank in masks]
        if all(torch.equal(mask, by_rank[0]) for mask in by_rank):
            continue
        if len({int(mask.sum()) for mask in by_rank}) > 1 or not torch.stack(by_rank).any(0).all():
            return None
        return Division(dim, tuple(_runs(mask) for mask in by_rank))
    return Division()


def _runs(mask: Tensor) -> tuple[Range, ...]:
    position, runs = 0, []
    for is_needed, group in groupby(mask.tolist()):
        length = len(list(group))
        if is_needed:
            runs.append((position, position + length))
        position += length
    return tuple(runs)
