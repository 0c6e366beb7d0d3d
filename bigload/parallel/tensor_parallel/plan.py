"""Tensor-parallel plan of a model: the part of every parameter that each rank holds, and the forwards of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch
from torch import Tensor

from bigload.planning.plan import PlanNote
from bigload.planning.tensor_parallel.division import WHOLE, Division

PlanSource = Literal["custom", "family", "tp_plan", "inferred"]
"""Origin of a plan: the caller's rules, those of the model's family, the model's own plan, or a forward's data flow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalArgument:
    """A tensor that a module is called with, and of which each rank takes its heads only.

    Attributes:
        name: The parameter of the module's `forward`.
        dim: Which dimension; it may hold `count` for each example of a batch, one after the other.
        count: How many heads all ranks have together.
    """

    name: str
    dim: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlan:
    """Plan of some modules, in the fields of `TensorParallelPlan`."""

    divisions: Mapping[str, Division] = field(default_factory=dict)
    styles: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, tuple[LocalArgument, ...]] = field(default_factory=dict)

    def __or__(self, other: PartialPlan) -> PartialPlan:
        """Return both together; where they disagree, `other` decides."""
        return PartialPlan(
            divisions={**self.divisions, **other.divisions},
            styles={**self.styles, **other.styles},
            attributes={**self.attributes, **other.attributes},
            arguments={**self.arguments, **other.arguments},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelPlan:
    """Division of a model among `size` ranks. It is data: it can be pickled, and holds no tensor.

    Attributes:
        size: How many ranks there are.
        source: Origin of its first part. The parts that this leaves whole come from the later ones.
        shapes: The shape of every parameter as a single process has it, by each of its names.
        divisions: For every parameter, by each of its names, what the ranks hold of it.
        styles: The forward of each divided module, by name (see `forwards.FORWARDS`). Other modules run as they are.
        attributes: Numbers that count what is now local, by their qualified names (`h.0.attn.num_heads`), and their
            values on every rank.
        arguments: By module, arguments that each rank cuts to its own part before the module sees them.
        notes: What is not divided, and why; what costs more than it might.
    """

    size: int
    source: PlanSource
    shapes: Mapping[str, tuple[int, ...]]
    divisions: Mapping[str, Division]
    styles: Mapping[str, str]
    attributes: Mapping[str, int] = field(default_factory=dict)
    arguments: Mapping[str, tuple[LocalArgument, ...]] = field(default_factory=dict)
    notes: tuple[PlanNote, ...] = ()

    def division(self, name: str) -> Division:
        """Return what ranks hold of the parameter or buffer `name`: all of it, where nothing else is known."""
        return self.divisions.get(name, WHOLE)

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the shape of what `rank` holds of the parameter `name`."""
        return self.division(name).shape(self.shapes[name], rank)

    def num_elements(self, rank: int) -> int:
        """Return how many numbers `rank` holds, a parameter with several names once for each of them."""
        return sum(prod(self.local_shape(name, rank)) for name in self.shapes)


def sliced(tensor: Tensor, division: Division, rank: int) -> Tensor:
    """Return what `rank` holds of `tensor`: a view where that is one range, all of it where it is not divided."""
    if division.dim is None:
        return tensor
    parts = [tensor.narrow(division.dim, start, stop - start) for start, stop in division.ranges[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, division.dim)
