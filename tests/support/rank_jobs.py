"""Jobs of ranks in tests of tensor parallelism; each returns what it found, in JSON's values."""

import torch
from torch.distributed import get_rank, get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bigload.errors import PartitionError
from bigload.parallel.tensor_parallel.apply import apply_tensor_parallel, placed, plan_tensor_parallel
from bigload.parallel.tensor_parallel.plan import sliced
from parallel_models import MODELS, example


def divided_models():
    """Divide each model and compare what it then is and does with what it was."""
    mesh = init_device_mesh("cpu", (get_world_size(),))
    return {name: _divided(make, mesh, get_rank()) for name, make in MODELS.items()}


def _divided(make, mesh, rank):
    model = make()
    whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}
    expected = model(**example())
    plan = plan_tensor_parallel(model, mesh.size(), example=example())
    apply_tensor_parallel(model, plan, mesh)
    found = model(**example())
    with torch.inference_mode():
        inferred = model(**example())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        "difference": _difference(found, expected),
        "inferred": _difference(inferred, expected),
        "shapes": all(tuple(_local(value).shape) == plan.local_shape(name, rank) for name, value in parameters.items()),
        "values": all(
            torch.equal(_local(value), sliced(whole[name], plan.division(name), rank))
            for name, value in parameters.items()
        ),
        "full": all(
            torch.equal(value.full_tensor(), whole[name])
            for name, value in parameters.items()
            if isinstance(value, DTensor)
        ),
        "num_placed": sum(isinstance(value, DTensor) for value in parameters.values()),
        "num_divided": sum(division.dim is not None for division in plan.divisions.values()),
        "ties": len(whole) - len({id(parameter) for parameter in parameters.values()}),
        "storage": max(
            _local(value).untyped_storage().nbytes() // 4 / _local(value).numel() for value in parameters.values()
        ),
    }


def filled_on_meta():
    """Divide a model on the meta device, fill it, and compare it with the whole."""
    rank, size = get_rank(), get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    make = MODELS["fused"]
    model = make()
    expected = model(**example())
    with torch.device("meta"):
        part = make()
    plan = plan_tensor_parallel(part, size, example=example())
    apply_tensor_parallel(part, plan, mesh)
    is_meta = all(_local(parameter).is_meta for parameter in part.parameters())
    local = {
        name: placed(sliced(parameter.detach(), plan.division(name), rank).clone(), name, plan, mesh)
        for name, parameter in model.named_parameters()
    }
    part.load_state_dict(local, assign=True, strict=False)
    part.head.weight = part.table.weight
    return {"is_meta": is_meta, "difference": _difference(part(**example()), expected)}


def refused():
    """Return what is said of plans that are not for this model or these ranks."""
    size = get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    plan = plan_tensor_parallel(MODELS["heads"](), size, example=example())
    other = plan_tensor_parallel(MODELS["heads"](), size + 1, example=example())
    return {"model": _error(MODELS["fused"](), plan, mesh), "ranks": _error(MODELS["heads"](), other, mesh)}


def _error(model, plan, mesh):
    try:
        apply_tensor_parallel(model, plan, mesh)
    except PartitionError as error:
        return str(error)
    return None


def _local(parameter):
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _difference(found, expected):
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max())


def all_jobs():
    return {"divided": divided_models(), "meta": filled_on_meta(), "refused": refused()}
