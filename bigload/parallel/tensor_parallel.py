"""Tensor parallelism of a model: a plan of who holds what, and its application to the modules of one rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bigload.parallel.tensor_parallel_plan import TensorParallelPlan


def plan_tensor_parallel(
    model: nn.Module,
    size: int,
    *,
    custom_policies: object = None,
    example: Mapping[str, object] | None = None,
) -> TensorParallelPlan:
    """Return how `size` ranks divide `model`, which may be on the meta device; no value of it is read.

    Args:
        model: What is to be divided.
        size: How many ranks there are.
        custom_policies: Words by patterns of names, which go before what the model says of itself.
        example: Arguments of a forward of `model`, by name, on any device; for models whose inputs are not known.

    Raises:
        PartitionError: the model does not divide among so many ranks as the policies ask.
    """
    raise NotImplementedError


def apply_tensor_parallel(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh) -> None:
    """Make `model` the part that this process, a rank of the one-dimensional `mesh`, has of it by `plan`.

    Args:
        model: On the meta device, or with full values, of which each rank keeps its own. Every parameter becomes a
            `DTensor` (of which `placed` tells how), or stays a tensor that every rank has.
        plan: Made for this model.
        mesh: The ranks, as many as the plan has.
    """
    raise NotImplementedError


def placed(local: Tensor, name: str, plan: TensorParallelPlan, mesh: DeviceMesh) -> Tensor:
    """Return `local`, what this rank holds of the parameter `name`, as the tensor that the parallel model has there.

    A `DTensor` where torch has a placement for the division (`Shard`, `_StridedShard`), else `local` itself.
    """
    raise NotImplementedError
