"""What modules of a tensor-parallel model do: torch's parallel styles for one rank's part of each.

Parameters are what `placements.placed` makes of them. The product itself is one of local tensors, because an operation
on a `DTensor` costs more than those of a small layer; ranks meet in one redistribution of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from bigload.parallel.layer_kinds import LayerKind, layer_kind
from bigload.planning.partition import Division


class LocalStyle(ParallelStyle):
    """A module whose forward is replaced by one on this rank's part of its parameters.

    Attributes:
        division: Of its weight.
        shape: The whole weight's.
    """

    def __init__(self, division: Division, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.division, self.shape = division, shape
        self.is_transposed = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.is_transposed = layer_kind(module) is LayerKind.TRANSPOSED
        module.forward = partial(self.forward, module, device_mesh, module.forward)  # type: ignore[method-assign]
        return module

    def forward(
        self, module: nn.Module, mesh: DeviceMesh, whole_forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the undivided module would, or this rank's part of it."""
        raise NotImplementedError

    def _product(self, module: nn.Module, inputs: Tensor, bias: Tensor | None) -> Tensor:
        weight = local(module._parameters["weight"])
        assert weight is not None
        return functional.linear(inputs, weight.T if self.is_transposed else weight, bias)


class ColwiseStyle(LocalStyle):
    """A layer that makes some of the outputs, from all of the inputs."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, _: object, inputs: Tensor) -> Tensor:
        """Return this rank's outputs."""
        return self._product(module, _entering(inputs, mesh), local(module._parameters.get("bias")))


class GatherStyle(LocalStyle):
    """A layer that makes some of the outputs, and gets the others from those who make them."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, _: object, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        outputs = self._product(module, _entering(inputs, mesh), local(module._parameters.get("bias")))
        assert self.division.dim is not None
        return _gathered(outputs, mesh, self.shape[self.division.dim])


class RowwiseStyle(LocalStyle):
    """A layer that works on some of the inputs, and adds up with the others what comes out."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, _: object, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        outputs = _summed(self._product(module, inputs, None), mesh)
        bias = module._parameters.get("bias")
        return outputs if bias is None else outputs + bias


class SplitInputStyle(RowwiseStyle):
    """A layer that takes its part of inputs of which every rank has all."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, _: object, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        ((start, stop),) = self.division.ranges[mesh.get_local_rank()]
        return super().forward(module, mesh, _, _entering(inputs, mesh)[..., start:stop])


class LookupStyle(LocalStyle):
    """A table of which each rank has some rows; it answers zeros for the others, and answers are added up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__dict__["padding_idx"] = None  # it means a row of the whole table, and is for gradients only
        return super()._apply(module, device_mesh)

    def forward(self, module: nn.Module, mesh: DeviceMesh, whole_forward: Callable[..., Tensor], ids: Tensor) -> Tensor:
        """Return the rows `ids`."""
        ((start, stop),) = self.division.ranges[mesh.get_local_rank()]
        is_here = (ids >= start) & (ids < stop)
        with local_parameters(module):
            rows = whole_forward(torch.where(is_here, ids - start, 0))
        return _summed(rows.masked_fill(~is_here.unsqueeze(-1), 0), mesh)


class LocalParametersStyle(LocalStyle):
    """A module that works on what this rank has of its parameters, as if that were all."""

    def forward(
        self, module: nn.Module, mesh: DeviceMesh, whole_forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what comes out."""
        with local_parameters(module):
            return whole_forward(*args, **kwargs)


class SumStyle(LocalParametersStyle):
    """A module whose outputs are added up with those of the others: experts, each rank having a part of each."""

    def forward(
        self, module: nn.Module, mesh: DeviceMesh, whole_forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Return the sum."""
        entered = [_entering(arg, mesh) if isinstance(arg, Tensor) else arg for arg in args]
        return _summed(super().forward(module, mesh, whole_forward, *entered, **kwargs), mesh)


STYLES: Mapping[str, type[LocalStyle]] = {
    "colwise": ColwiseStyle,
    "colwise_gather_output": GatherStyle,
    "rowwise": RowwiseStyle,
    "rowwise_split_input": SplitInputStyle,
    "embedding_rowwise": LookupStyle,
    "local_params": LocalParametersStyle,
    "moe_tp_experts": SumStyle,
}
"""By the word that a plan has for it."""


def local(parameter: Tensor | None) -> Tensor | None:
    """Return what this rank has of `parameter`."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@contextmanager
def local_parameters(module: nn.Module) -> Iterator[None]:
    """Let the code of `module` see this rank's part of its own parameters, within the context."""
    own = dict(module._parameters)
    try:
        module._parameters.update({name: local(parameter) for name, parameter in own.items()})  # type: ignore[misc]
        yield
    finally:
        module._parameters.update(own)


def _entering(inputs: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return `inputs`, which all ranks have; of their gradient each rank makes a part."""
    if not (inputs.requires_grad and torch.is_grad_enabled()):
        return inputs
    whole = DTensor.from_local(inputs, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _summed(part: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(part, mesh, [Partial()], run_check=False).redistribute(placements=[Replicate()]).to_local()


def _gathered(part: Tensor, mesh: DeviceMesh, width: int) -> Tensor:
    """Return the parts of all ranks side by side along the last dimension."""
    shape = torch.Size((*part.shape[:-1], width))
    stride = torch.empty(shape, device="meta").stride()
    split = DTensor.from_local(
        part.contiguous(), mesh, [Shard(part.ndim - 1)], run_check=False, shape=shape, stride=stride
    )
    return split.redistribute(placements=[Replicate()]).to_local()

