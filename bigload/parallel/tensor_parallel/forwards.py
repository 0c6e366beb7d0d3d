"""Forwards of divided modules: torch's parallel styles for one rank's part of each.

Parameters are what `placements.placed` makes of them. What is computed are products of local tensors, and one
collective on what comes out: an operation on a `DTensor` costs more than a small layer does. They are for inference:
sums have no history, so no gradient is made that would lack the other ranks' part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from bigload.parallel.tensor_parallel.partial_plan import sliced
from bigload.planning.tensor_parallel.division import Division, Range

_Forward = Callable[..., object]


class LocalForward(ParallelStyle):
    """A module that works on what this rank has of its parameters, as if that were all.

    Attributes:
        division: Of its weight, if it has one.
    """

    def __init__(self, division: Division) -> None:
        super().__init__()
        self.division = division

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = partial(self.forward, module, device_mesh, module.forward)
        return module

    def forward(
        self,
        module: nn.Module,
        mesh: DeviceMesh,  # noqa: ARG002
        own_forward: _Forward,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Return what the forward of `module`, a rank of `mesh`, returns in place of `own_forward`, which it was."""
        with local_parameters(module):
            return own_forward(*args, **kwargs)


class SummedForward(LocalForward):
    """A module whose outputs are added up with those of the others: experts, each rank having a part of each."""

    def forward(
        self, module: nn.Module, mesh: DeviceMesh, own_forward: _Forward, *args: object, **kwargs: object
    ) -> object:
        """Return the sum."""
        return _summed(super().forward(module, mesh, own_forward, *args, **kwargs), mesh)


class LayerForward(LocalForward):
    """A layer, whose product is computed here.

    Attributes:
        is_transposed: Whether its weight is stored inputs first.
    """

    is_transposed = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.is_transposed = layer_kind(module) is LayerKind.TRANSPOSED
        return super()._apply(module, device_mesh)

    def forward(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        own_forward: _Forward,  # noqa: ARG002
        *args: object,
        **kwargs: object,
    ) -> object:
        """Return this rank's outputs, or those of all."""
        (inputs,) = (*args, *kwargs.values())
        assert isinstance(inputs, Tensor)
        return self.answer(module, mesh, inputs)

    def answer(self, module: nn.Module, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
        """Return what the layer makes of `inputs`."""
        raise NotImplementedError

    def product(self, module: nn.Module, inputs: Tensor, *, has_bias: bool) -> Tensor:
        """Return the product of `inputs` and what this rank has of the weight, with its bias or without."""
        weight = local(module._parameters["weight"])
        assert weight is not None
        bias = local(module._parameters.get("bias")) if has_bias else None
        return functional.linear(inputs, weight.T if self.is_transposed else weight, bias)


class ColwiseForward(LayerForward):
    """A layer that makes some of the outputs, from all of the inputs."""

    def answer(self, module: nn.Module, mesh: DeviceMesh, inputs: Tensor) -> Tensor:  # noqa: ARG002
        """Return this rank's outputs."""
        return self.product(module, inputs, has_bias=True)


class GatheredForward(LayerForward):
    """A layer that makes some of the outputs, and gets the others from those who make them."""

    def answer(self, module: nn.Module, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        return _gathered(self.product(module, inputs, has_bias=True), mesh, self.division.ranges)


class RowwiseForward(LayerForward):
    """A layer that works on some of the inputs, and adds up with the others what comes out."""

    def answer(self, module: nn.Module, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        outputs = _summed(self.product(module, inputs, has_bias=False), mesh)
        bias = module._parameters.get("bias")
        return outputs if bias is None else outputs + bias


class SplitInputForward(RowwiseForward):
    """A layer that takes its part of inputs of which every rank has all."""

    def answer(self, module: nn.Module, mesh: DeviceMesh, inputs: Tensor) -> Tensor:
        """Return all outputs."""
        return super().answer(module, mesh, sliced(inputs, Division(-1, self.division.ranges), mesh.get_local_rank()))


class LookupForward(LocalForward):
    """A table of which each rank has some rows; it answers zeros for the others, and answers are added up."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.__dict__["padding_idx"] = None  # it means a row of the whole table, and is for gradients only
        return super()._apply(module, device_mesh)

    def forward(
        self, module: nn.Module, mesh: DeviceMesh, own_forward: _Forward, *args: object, **kwargs: object
    ) -> object:
        """Return the rows that are asked for."""
        (indices,) = (*args, *kwargs.values())
        assert isinstance(indices, Tensor)
        self._check(indices)
        ((start, stop),) = self.division.ranges[mesh.get_local_rank()]
        is_here = (indices >= start) & (indices < stop)
        rows = super().forward(module, mesh, own_forward, torch.where(is_here, indices - start, 0))
        assert isinstance(rows, Tensor)
        return _summed(rows.masked_fill(~is_here.unsqueeze(-1), 0), mesh)

    def _check(self, indices: Tensor) -> None:
        """Raise `IndexError` for a row that no rank has, as a whole table does: else it would be answered with zeros.

        On an accelerator a check would wait for it, so the kernel fails there, as that of a whole table does.
        """
        num_rows = max(stop for ranges in self.division.ranges for _, stop in ranges)
        is_row = (indices >= 0) & (indices < num_rows)
        if indices.device.type == "cuda":
            torch._assert_async(is_row.all())
        elif not is_row.all():
            wrong = int(indices[~is_row].flatten()[0])
            raise IndexError(f"index out of range: {wrong}, in a table of {num_rows} rows")


FORWARDS: Mapping[str, type[LocalForward]] = {
    "colwise": ColwiseForward,
    "colwise_gather_output": GatheredForward,
    "rowwise": RowwiseForward,
    "rowwise_split_input": SplitInputForward,
    "embedding_rowwise": LookupForward,
    "local_params": LocalForward,
    "moe_tp_experts": SummedForward,
}
"""By forward style, as plans name it."""


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


def _summed(part: object, mesh: DeviceMesh) -> Tensor:
    """Return the sum of what all ranks have, in place of `part`."""
    assert isinstance(part, Tensor)
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
