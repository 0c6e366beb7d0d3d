"""Partial plans, and the parts of tensors that a rank holds by their divisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bigload.parallel.tensor_parallel.plan import LocalArgument
from bigload.planning.tensor_parallel.division import Division


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


def sliced(tensor: Tensor, division: Division, rank: int) -> Tensor:
    """Return what `rank` holds of `tensor`: a view where that is one range, all of it where it is not divided."""
    if division.dim is None:
        return tensor
    parts = [tensor.narrow(division.dim, start, stop - start) for start, stop in division.ranges[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, division.dim)


def cut(tensor: Tensor, argument: LocalArgument, rank: int, size: int) -> Tensor:
    """Return what `rank` takes of `tensor`, an argument with `count` heads along a dimension, for each example."""
    dim, share = argument.dim, argument.count // size
    heads = tensor.reshape(*tensor.shape[:dim], -1, argument.count, *tensor.shape[dim + 1 :])
    return heads.narrow(dim + 1, rank * share, share).flatten(dim, dim + 1)
