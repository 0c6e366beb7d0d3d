"""Distributed checkpoints for tests: what each rank of a training saves, in real processes."""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Mlp(nn.Module):
    """Sizes that ranks do not divide evenly, and tensors that are no floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.register_buffer("seen", torch.arange(5))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.embed(tokens))))


def model() -> Mlp:
    """Return the model, always with the same weights."""
    torch.manual_seed(0)
    return Mlp()


def sharded(kind: str, size: int) -> Mlp:
    """Return the model as this rank has it: sharded by `fsdp`, `tp` or both."""
    made = model()
    if kind == "fsdp":
        fully_shard(made, mesh=init_device_mesh("cpu", (size,)))
    elif kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(made, init_device_mesh("cpu", (size,)), plan)
    elif kind == "fsdp+tp":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(made, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(made, mesh=mesh["dp"])
    return made


def save(kind: str, folder: str) -> bool:
    """Save the model and an optimizer that has made a step, below `model` and `optim`."""
    size = torch.distributed.get_world_size()
    made = sharded(kind, size)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.0)
    made(torch.arange(11)).sum().backward()
    optimizer.step()
    state = {"model": get_model_state_dict(made), "optim": get_optimizer_state_dict(made, optimizer), "step": 3}
    dcp.save(state, checkpoint_id=folder)
    return True


def save_consolidated(kind: str, folder: str) -> bool:
    """Save the floating-point weights as torch's own safetensors: in parts below `sharded`, and put together."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter  # torch 2.6 has none

    made = sharded(kind, torch.distributed.get_world_size())
    state = {name: each for name, each in get_model_state_dict(made).items() if each.is_floating_point()}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(
            state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
        )
    return True


def save_experts(folder: str) -> bool:
    """Save experts of which each rank has some, in the saved dict itself."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    whole = experts()
    dcp.save({name: distribute_tensor(each, mesh, [Shard(0)]) for name, each in whole.items()}, checkpoint_id=folder)
    return True


def save_divided(file: str, folder: str) -> bool:
    """Save the tensors of a safetensors file, each divided along one dimension, the next one along the next."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    tensors = enumerate(load_file(file).items())
    state = {name: distribute_tensor(each, mesh, [Shard(number % each.dim())]) for number, (name, each) in tensors}
    dcp.save({"model": state}, checkpoint_id=folder)
    return True


def experts() -> dict[str, torch.Tensor]:
    """Return the weights of five experts, as one parameter."""
    return {"layers.0.experts.gate_up": torch.arange(5 * 4 * 6, dtype=torch.bfloat16).view(5, 4, 6)}


def save_alone(folder: str, state: dict[str, object]) -> None:
    """Save `state` from this process."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder)


def load_alone(folder: str, state: dict[str, object]) -> None:
    """Fill `state` in this process."""
    with warnings.catch_warnings(action="ignore"):
        dcp.load(state, checkpoint_id=folder)


def load(kind: str, folder: str) -> bool:
    """Load `folder` into a model with other weights, sharded by `kind`; return whether it then has those of `model`."""
    made = sharded(kind, torch.distributed.get_world_size())
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    state = get_model_state_dict(made)
    dcp.load(state, checkpoint_id=folder)
    found = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in state.items()}
    return all(torch.equal(found[name], each) for name, each in model().state_dict().items())
