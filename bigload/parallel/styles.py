"""What modules of a tensor-parallel model do: torch's parallel styles for one rank's part of each.

Parameters are what `placements.placed` makes of them. What is computed are products of local tensors, and one collective
on what comes out: an operation on a `DTensor` costs more than a small layer does. They are for inference: outputs have no
history, so no gradient is made that would lack the other ranks' part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from bigload.parallel.layer_kinds import LayerKind, layer_kind
from bigload.planning.partition import Division, Range


class LocalStyle(ParallelStyle):
    """A module whose forward is replaced by one on this rank's part of its parameters.

    Attributes:
        division: Of its weight.
        is_transposed: Whether that is stored inputs first.
    """

    def __init__(self, division: Division) -> None:
        super().__init__()
        self.division = division
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
        return self._product(module, inputs, local(module._parameters.get("bias")))


class GatherStyle(LocalStyle):
    """A layer that makes some of the outputs, and gets the others from those who make them."""

    def forward(self, module: nn.Module, mesh: DeviceMesh, _: object, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        outputs = self._product(module, inputs, local(module._parameters.get("bias")))
        return _gathered(outputs, mesh, self.division.ranges)


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
        return super().forward(module, mesh, _, inputs[..., start:stop])


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
        return _summed(super().forward(module, mesh, whole_forward, *args, **kwargs), mesh)


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


def _summed(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the sum of what all ranks have, in place of `part`."""
    total = part.detach().contiguous()
    distributed.all_reduce(total, group=mesh.get_group())
    return total


def _gathered(part: Tensor, mesh: DeviceMesh, ranges: Sequence[Sequence[Range]]) -> Tensor:
    """Return the parts of all ranks side by side along the last dimension; the first is none of the shorter ones."""
    widths = [sum(stop - start for start, stop in of_rank) for of_rank in ranges]
    padded = functional.pad(part.detach(), (0, widths[0] - part.shape[-1])).contiguous()
    parts = [torch.empty_like(padded) for _ in widths]
    distributed.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat([one[..., :width] for one, width in zip(parts, widths, strict=True)], -1)
