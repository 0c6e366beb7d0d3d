"""Tensor parallelism of a model: its plan, and the application of the plan to the modules of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.modules.conv import _ConvNd

from bigload.errors import PartitionError
from bigload.parallel.tensor_parallel.custom_policies import read_policies
from bigload.parallel.tensor_parallel.forwards import cut_arguments, replace_forward
from bigload.parallel.tensor_parallel.plan import TensorParallelPlan, sliced
from bigload.parallel.tensor_parallel.planner import make_plan
from bigload.planning.tensor_parallel.division import MAX_RANKS, WHOLE, Division, chunks


def plan_tensor_parallel(
    model: nn.Module,
    size: int,
    *,
    custom_policies: object = None,
    example: Mapping[str, object] | None = None,
) -> TensorParallelPlan:
    """Return how `size` ranks divide `model`, which may be on the meta device; no value of it is read.

    Each layer is divided by the first of these that applies and fits: `custom_policies`; the rules of the model's
    family, by which `bigload reshard --tp` divides checkpoints; the tensor-parallel plan of the model itself, as
    transformers' models have; the data flow between layers in a forward without weights. Large layers that are left are
    divided one by one. Every plan is validated by such forwards, as the first and the last rank.

    Args:
        model: What is to be divided.
        size: How many ranks there are.
        custom_policies: Styles by patterns of names, before all other rules (see `RULE_STYLES`):
            `{"attention.self.query": "colwise", "attention.output.dense": "rowwise"}`. Or a policy as parallelformers
            has them, or a list of such (see `custom_policies`). What they leave out is divided as it is found.
        example: Arguments of a forward of `model`, by name; where they are not given, what models of transformers take
            is known from their class and config.

    Raises:
        PartitionError: the policies do not suit the model, or so many ranks.
    """
    if not 1 <= size <= MAX_RANKS:
        raise PartitionError(f"cannot divide among {size} ranks", hint=f"choose 1 to {MAX_RANKS}")
    rules, attributes = read_policies(model, custom_policies, size)
    with torch.device("cpu"), _one_thread():
        return make_plan(model, size, rules, attributes, example)


def apply_tensor_parallel(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh) -> None:
    """Make `model` the part that this process, a rank of the one-dimensional `mesh`, has of it by `plan`.

    What it then returns is what the whole model returns, on every rank; it is for inference, without gradients. Weights
    of attention that it may return beside are those of the rank's own heads.

    Args:
        model: On the meta device, or with full values, of which each rank keeps its own. A parameter becomes a
            `DTensor`, or a tensor of its local shape where torch has no placement for its division (`placed`) and in
            convolutions, or stays what it is if every rank has all of it.
        plan: Made for this model.
        mesh: The ranks, as many as the plan has.

    Raises:
        PartitionError: the plan is for another model or another number of ranks.
    """
    _check(model, plan, mesh)
    rank = mesh.get_local_rank()
    # A module with several names has the style of the first.
    styles = {model.get_submodule(name): name for name in reversed(list(plan.styles))}
    _divide_parameters(model, plan, mesh, rank)
    for name, value in plan.attributes.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, value)
    for name, arguments in plan.arguments.items():
        cut_arguments(model.get_submodule(name), arguments, rank, plan.size)
    for module, name in styles.items():
        replace_forward(module, plan.styles[name], plan.division(f"{name}.weight"), mesh)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute in this thread alone: what is computed here is too little for waiting for others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1 or mesh.size() != plan.size:
        shape = tuple(mesh.shape)
        raise PartitionError(f"a plan for {plan.size} ranks, and a mesh of shape {shape}", hint="plan for these ranks")
    found = {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}
    if found != plan.shapes:
        names = [name for name in {**found, **plan.shapes} if found.get(name) != plan.shapes.get(name)]
        raise PartitionError(
            "the plan was made for another model",
            details=[f"{name}: expected {plan.shapes.get(name)}, found {found.get(name)}" for name in names],
        )


def _divide_parameters(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh, rank: int) -> None:
    done: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        division = plan.division(name)
        if division == WHOLE:
            continue
        path, _, last = name.rpartition(".")
        owner = model.get_submodule(path)
        if id(parameter) not in done:
            part = sliced(parameter.detach(), division, rank).clone().contiguous()  # lets go of the rest
            # The module around a convolution may call a kernel of its own with its weight.
            tensor = part if isinstance(owner, _ConvNd) else placed(part, name, plan, mesh)
            done[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        owner._parameters[last] = done[id(parameter)]


def placed(local: Tensor, name: str, plan: TensorParallelPlan, mesh: DeviceMesh) -> Tensor:
    """Return `local`, what this rank holds of the parameter `name`, as the tensor that the parallel model has there.

    A `DTensor` where torch has a placement for its division, else `local` itself.
    """
    division = plan.division(name)
    shape = torch.Size(plan.shapes[name])
    found = None if division.dim is None else _placement(division, shape[division.dim])
    if found is None:
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [found], run_check=False, shape=shape, stride=stride)


def _placement(division: Division, length: int) -> Placement | None:
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
