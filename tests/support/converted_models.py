"""A model whose checkpoint names, splits, transposes and interleaves its tensors otherwise, and its conversion by hand.

What transformers says of its models is said here for one that needs no transformers.
"""

import torch
from streamed_models import save
from torch import nn

from bigload.conversion.checkpoint_view import CheckpointView
from bigload.conversion.conversion import Conversion, as_stored
from bigload.conversion.with_transformers.recorded_tensor import RecordedTensor
from bigload.runtime.dispatch import packed_weights

WIDTH, INNER, NUM_EXPERTS, NUM_LAYERS = 8, 6, 4, 3
IDS = torch.arange(12).reshape(2, 6)


class Rotary(nn.Module):
    """A module with nothing but a computed buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)

    def forward(self, x):
        return x * self.scale.to(x.dtype)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * INNER, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, INNER) / 3)

    def forward(self, x, shares):
        total = x * 0
        for expert in range(NUM_EXPERTS):
            both = nn.functional.linear(x, self.gate_up[expert])
            inner = torch.tanh(both[..., :INNER]) * both[..., INNER:]
            total = total + nn.functional.linear(inner, self.down[expert]) * shares[..., expert : expert + 1]
        return total


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.mixed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()

    def forward(self, x):
        x = x + torch.tanh(self.q(x)) * self.k(x) + self.mixed(self.v(x))
        return x + self.experts(x, torch.tanh(self.router(x)))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.rotary = Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))

    def forward(self, ids):
        x = self.rotary(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return x


class Converted(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self):
        super().__init__()
        self.model = Body()
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids):
        return self.head(self.model(ids))


def stored_state(model):
    """Return the tensors of `model` as its checkpoint has them."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    found = {"embed.weight": state["model.embed.weight"], "head.weight": state["head.weight"]}
    for number in range(NUM_LAYERS):
        layer = {name: state[f"model.layers.{number}.{name}"] for name in model.model.layers[number].state_dict()}
        block = f"blocks.{number}"
        found[f"{block}.qkv.weight"] = torch.cat([layer["q.weight"], layer["k.weight"], layer["v.weight"]])
        found[f"{block}.router.weight"] = layer["router.weight"].T.contiguous()
        found[f"{block}.mixed.weight"] = layer["mixed.weight"].view(2, WIDTH // 2, WIDTH).transpose(0, 1).flatten(0, 1)
        for expert in range(NUM_EXPERTS):
            gate, up = layer["experts.gate_up"][expert].chunk(2)
            found |= {f"{block}.experts.{expert}.w1": gate, f"{block}.experts.{expert}.w3": up}
            found[f"{block}.experts.{expert}.w2"] = layer["experts.down"][expert]
    return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def conversion_of(stored, **found):
    """Return how the tensors of `Converted` are made of `stored` ones, with `problems` and what else is given."""

    def recorded(name):
        return RecordedTensor(as_stored(stored[name]), torch.float32)

    tensors = {"model.embed.weight": recorded("embed.weight"), "head.weight": recorded("head.weight")}
    for number in range(NUM_LAYERS):
        layer, block = f"model.layers.{number}", f"blocks.{number}"
        for name, part in zip("qkv", recorded(f"{block}.qkv.weight").chunk(3), strict=True):
            tensors[f"{layer}.{name}.weight"] = part
        tensors[f"{layer}.router.weight"] = recorded(f"{block}.router.weight").T
        mixed = recorded(f"{block}.mixed.weight")
        tensors[f"{layer}.mixed.weight"] = torch.cat([mixed[::2], mixed[1::2]])
        names = [f"{block}.experts.{expert}" for expert in range(NUM_EXPERTS)]
        fused = [torch.stack([recorded(f"{name}.{part}") for name in names]) for part in ("w1", "w3", "w2")]
        tensors[f"{layer}.experts.gate_up"] = torch.cat(fused[:2], 1)
        tensors[f"{layer}.experts.down"] = fused[2]
    return Conversion(tensors={name: each.origin for name, each in tensors.items()}, **found)


def view_of(checkpoint, **found):
    conversion = conversion_of(checkpoint.tensors, **found)
    return CheckpointView(checkpoint=checkpoint, tensors=conversion.of(checkpoint), conversion=conversion)


def convert(monkeypatch, **found):
    """Have checkpoints viewed as `Converted` wants them, as those of transformers are."""
    monkeypatch.setattr(packed_weights, "view_for", lambda _, checkpoint: view_of(checkpoint, **found))


def made_converted():
    torch.manual_seed(0)
    return Converted().eval()


def saved_converted(folder):
    """Write a checkpoint of the model, with a file for each block, and return its folder."""
    return save(None, folder, stored_state(made_converted()))
