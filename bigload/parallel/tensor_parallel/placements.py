"""Conversion of divisions to the placements of torch's `DTensor`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from bigload.parallel.tensor_parallel.plan import TensorParallelPlan
from bigload.planning.tensor_parallel.division import Division, chunks


def placement(division: Division, length: int) -> Placement | None:
    """Return the placement of a tensor that is divided so along `length` elements; `None` where torch has none.

    `Shard` for one range each, as `torch.chunk` has them; `_StridedShard` for equal parts, each divided so.
    """
    if division.dim is None:
        return None
    size = len(division.ranges)
    if division.ranges == chunks(length, size):
        return Shard(division.dim)
    num_parts = len(division.ranges[0])
    if num_parts < 2 or length % (num_parts * size):
        return None
    part = length // num_parts
    by_part = [
        tuple((start + number * part, stop + number * part) for ((start, stop),) in chunks(part, size))
        for number in range(num_parts)
    ]
    is_strided = division.ranges == tuple(zip(*by_part, strict=True))
    return _StridedShard(division.dim, split_factor=num_parts) if is_strided else None


def placed(local: Tensor, name: str, plan: TensorParallelPlan, mesh: DeviceMesh) -> Tensor:
    """Return `local`, what this rank holds of the parameter `name`, as the tensor that the parallel model has there.

    A `DTensor` where torch has a placement for its division, else `local` itself.
    """
    division = plan.division(name)
    shape = torch.Size(plan.shapes[name])
    found = None if division.dim is None else placement(division, shape[division.dim])
    if found is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [found], run_check=False, shape=shape, stride=stride)
