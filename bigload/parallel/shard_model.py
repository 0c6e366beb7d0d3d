"""Setup of a worker's model: divide it by a tensor-parallel plan and read the part of the rank from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bigload.conversion.checkpoint_view import CheckpointView
from bigload.loading.settings import Method
from bigload.parallel.sharded_loading.load_sharded import load_sharded
from bigload.parallel.tensor_parallel.apply import apply_tensor_parallel
from bigload.parallel.tensor_parallel.plan import TensorParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardModel:
    """A `ModelSetup` that workers unpickle and call; `plan` divides the model.

    `stored` are the tensors of a checkpoint by the names of the model, if there are weights on the meta device.
    Floating-point weights become `dtype`; `None` leaves each as it is.
    """

    plan: TensorParallelPlan
    stored: CheckpointView | None
    method: Method | str | None
    dtype: torch.dtype | None

    def __call__(self, model: nn.Module, mesh: DeviceMesh, device: torch.device) -> int:
        """Make `model` the part of this rank, and return how many bytes of the checkpoint were read for it."""
        apply_tensor_parallel(model, self.plan, mesh)
        if self.dtype is not None:
            _cast(model, self.dtype)
        if self.stored is None:
            return 0
        divided = {name: division for name, division in self.plan.divisions.items() if division.dim is not None}
        reports = load_sharded(model, self.stored, divisions=divided, device=device, strict=False, method=self.method)
        return next(report.read_bytes for report in reports if report.rank == mesh.get_rank())


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point weights to `dtype`, but not buffers that no state dict has, such as rotary tables."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in cast:  # tied parameters stay tied
                    cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
                module._parameters[name] = cast[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)
