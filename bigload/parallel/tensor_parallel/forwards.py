"""Forwards of divided modules on one rank: products of local tensors, and one collective on what comes out.

Parameters are what `apply.placed` makes of them, but an operation on a `DTensor` costs more than a small layer does.
The forwards are for inference: sums have no history, so no gradient is made that would lack the other ranks' part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from bigload.parallel.tensor_parallel.layer_kinds import LayerKind, layer_kind
from bigload.parallel.tensor_parallel.plan import LocalArgument, sliced
from bigload.planning.tensor_parallel.division import Division, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedModule:
    """A module of which this process, a rank of `mesh`, has a part.

    Attributes:
        own_forward: Its forward in the whole model.
        division: Of its weight, if it has one.
        is_transposed: Whether its weight is stored inputs first.
    """

    module: nn.Module
    mesh: DeviceMesh
    own_forward: Callable[..., object]
    division: Division
    is_transposed: bool = False

    def product(self, inputs: Tensor, *, has_bias: bool = True) -> Tensor:
        """Return the product of `inputs` and this rank's part of the weight, with its bias or without."""
        parameters = self.module._parameters
        weight = _local(parameters["weight"])
        assert weight is not None
        bias = _local(parameters.get("bias")) if has_bias else None
        return functional.linear(inputs, weight.T if self.is_transposed else weight, bias)


def replace_forward(module: nn.Module, style: str, division: Division, mesh: DeviceMesh) -> None:
    """Give `module`, whose weight has this `division`, the forward of `style` in the ranks of `mesh`."""
    if style == "embedding_rowwise":
        module.__dict__["padding_idx"] = None  # it means a row of the whole table, and is for gradients only
    # A module that runs its own code may be anything: only products ask how the weight is stored.
    is_transposed = style in _PRODUCTS and layer_kind(module) is LayerKind.TRANSPOSED
    divided = DividedModule(
        module=module, mesh=mesh, own_forward=module.forward, division=division, is_transposed=is_transposed
    )
    module.forward = partial(FORWARDS[style], divided)


def run_locally(divided: DividedModule, *args: object, **kwargs: object) -> object:
    """Run the module's own code on this rank's parameters, as if they were all."""
    parameters = divided.module._parameters
    own = dict(parameters)
    try:
        parameters.update({name: _local(parameter) for name, parameter in own.items()})  # type: ignore[misc]
        return divided.own_forward(*args, **kwargs)
    finally:
        parameters.update(own)


def run_summed(divided: DividedModule, *args: object, **kwargs: object) -> object:
    """Run locally and sum the outputs of all ranks: experts, each rank having a part of each."""
    return _summed(run_locally(divided, *args, **kwargs), divided.mesh)


def run_own_experts(divided: DividedModule, *args: object, **kwargs: object) -> object:
    """Run locally and sum the outputs of all ranks: experts, each rank having some of them."""
    args, kwargs = _to_own_experts(divided.module, divided.mesh.get_local_rank(), args, kwargs)
    return run_summed(divided, *args, **kwargs)


def route_to_own(module: nn.Module, rank: int) -> RemovableHandle:
    """Let `module` see only what is routed to the experts of `rank`; return the handle that ends it."""
    return module.register_forward_pre_hook(
        lambda _, args, kwargs: _to_own_experts(module, rank, args, kwargs), with_kwargs=True
    )


def _to_own_experts(
    module: nn.Module, rank: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of experts of which `rank` has its part: what is routed to others has the weight 0.

    Arguments are the numbers of the chosen experts, and of the same shape the weights of what each makes.
    """
    count = len(_local(next(iter(module._parameters.values()))))  # type: ignore[arg-type]
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    chosen = next(value for value in given if not value.is_floating_point())
    weights = [value for value in given if value.is_floating_point() and value.shape == chosen.shape][-1]
    own = chosen - rank * count
    is_here = (own >= 0) & (own < count)
    changed = {id(chosen): own.where(is_here, 0), id(weights): weights.masked_fill(~is_here, 0)}
    return (
        tuple(changed.get(id(value), value) for value in args),
        {name: changed.get(id(value), value) for name, value in kwargs.items()},
    )


def colwise(divided: DividedModule, inputs: Tensor) -> Tensor:
    """Return this rank's outputs, made of all inputs."""
    return divided.product(inputs)


def gathered(divided: DividedModule, inputs: Tensor) -> Tensor:
    """Return the outputs of all ranks, each made of all inputs."""
    return _gathered(divided.product(inputs), divided.mesh, divided.division.ranges)


def rowwise(divided: DividedModule, inputs: Tensor) -> Tensor:
    """Return the sum of what all ranks make of their own part of the inputs."""
    outputs = _summed(divided.product(inputs, has_bias=False), divided.mesh)
    bias = divided.module._parameters.get("bias")
    return outputs if bias is None else outputs + bias


def rowwise_split_input(divided: DividedModule, inputs: Tensor) -> Tensor:
    """Return what `rowwise` does, for inputs of which every rank has all."""
    own = Division(-1, divided.division.ranges)
    return rowwise(divided, sliced(inputs, own, divided.mesh.get_local_rank()))


def look_up(divided: DividedModule, indices: Tensor) -> Tensor:
    """Return rows of a table that ranks divide: each gives zeros for the rows of others, and outputs are summed."""
    _check_rows(divided.division, indices)
    ((start, stop),) = divided.division.ranges[divided.mesh.get_local_rank()]
    is_here = (indices >= start) & (indices < stop)
    rows = run_locally(divided, torch.where(is_here, indices - start, 0))
    assert isinstance(rows, Tensor)
    return _summed(rows.masked_fill(~is_here.unsqueeze(-1), 0), divided.mesh)


def _check_rows(division: Division, indices: Tensor) -> None:
    """Raise `IndexError` for a row that no rank has, as a whole table does: else it would be answered with zeros.

    On an accelerator a check would wait for it, so the kernel fails there, as that of a whole table does.
    """
    num_rows = max(stop for ranges in division.ranges for _, stop in ranges)
    is_row = (indices >= 0) & (indices < num_rows)
    if indices.device.type == "cuda":
        torch._assert_async(is_row.all())
    elif not is_row.all():
        wrong = int(indices[~is_row].flatten()[0])
        raise IndexError(f"index out of range: {wrong}, in a table of {num_rows} rows")


def _of_inputs(compute: Callable[[DividedModule, Tensor], Tensor]) -> Callable[..., object]:
    @wraps(compute)
    def forward(divided: DividedModule, *args: object, **kwargs: object) -> object:
        (inputs,) = (*args, *kwargs.values())
        assert isinstance(inputs, Tensor)
        return compute(divided, inputs)

    return forward


_PRODUCTS = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")

FORWARDS: Mapping[str, Callable[..., object]] = {
    "colwise": _of_inputs(colwise),
    "colwise_gather_output": _of_inputs(gathered),
    "rowwise": _of_inputs(rowwise),
    "rowwise_split_input": _of_inputs(rowwise_split_input),
    "embedding_rowwise": _of_inputs(look_up),
    "local_params": run_locally,
    "moe_tp_experts": run_summed,
    "moe_ep_experts": run_own_experts,
}
"""By forward style, as plans name it."""


def cut_arguments(module: nn.Module, arguments: Sequence[LocalArgument], rank: int, size: int) -> RemovableHandle:
    """Let `module` see only what `rank` has of `arguments` from now on; return the handle that ends it."""
    parameters = signature(module.forward)

    def pre_forward(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = parameters.bind_partial(*args, **kwargs)
        for argument in arguments:
            value = given.arguments.get(argument.name)
            if isinstance(value, Tensor) and value.shape[argument.dim] % argument.count == 0:  # else one for all
                given.arguments[argument.name] = _cut(value, argument, rank, size)
        return given.args, given.kwargs

    return module.register_forward_pre_hook(pre_forward, with_kwargs=True)


def _cut(tensor: Tensor, argument: LocalArgument, rank: int, size: int) -> Tensor:
    dim, share = argument.dim, argument.count // size
    heads = tensor.reshape(*tensor.shape[:dim], -1, argument.count, *tensor.shape[dim + 1 :])
    return heads.narrow(dim + 1, rank * share, share).flatten(dim, dim + 1)


def _local(parameter: Tensor | None) -> Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _summed(part: object, mesh: DeviceMesh) -> Tensor:
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
