"""A small model of blocks whose weights stream from a checkpoint, and ways to look at what streams."""

import contextlib
import json
import threading

import torch
from safetensors.torch import save_file
from torch import nn

import bigload

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x, *, times=1):
        return x + self.down(torch.tanh(self.up(x))) * self.scale * times


class Model(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self, num_layers=6, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 16)

    def forward(self, ids):
        x = self.embed(ids) if ids.dtype == torch.long else ids
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Table(nn.Module):
    """A module that gives its weight out, as modules with tables of positions do."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1 << 12,), value))

    def forward(self):
        return self.weight


class Tables(nn.Module):
    """Six tables, each full of its number."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.tables = nn.ModuleList(Table(float(number)) for number in range(6))
        self.to(dtype)

    def forward(self):
        return [table() for table in self.tables]


class Residual(nn.Module):
    def __init__(self, width, bias):
        super().__init__()
        self.up = nn.Linear(width, width, bias=bias)
        self.down = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Residuals(nn.Module):
    """Blocks of equal size, with the same weights each time that they are made."""

    def __init__(self, num_blocks, width, bias=True, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Residual(width, bias) for _ in range(num_blocks))
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


IDS = torch.arange(10).reshape(2, 5)


def made(kind=Model, *args):
    torch.manual_seed(0)
    return kind(*args)


def save(model, folder, weights=None):
    """Write a checkpoint of `model`, a file for each child of a list and one for the rest, and return its folder."""
    files = {}
    for name, tensor in (model.state_dict() if weights is None else weights).items():
        number = next((part for part in name.split(".") if part.isdigit()), "rest")
        files.setdefault(f"model-{number}.safetensors", {})[name] = tensor.detach().clone()
    folder.mkdir(exist_ok=True)
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def streamed(folder, kind=Model, *args, **options):
    """Return a model with all of its weights in the checkpoint at `folder`."""
    with bigload.init_empty_weights():
        empty = kind(*args)
    return bigload.load_checkpoint_and_dispatch(empty, folder, {"": "disk"}, **options)


def blocks_of(model):
    """Return what streams in `model`, by name."""
    hooks = (each for module in model.modules() for each in hooks_of(module))
    return {hook.block.name: hook.block for hook in hooks if getattr(hook, "block", None) is not None}


def hooks_of(module):
    hook = module.__dict__.get("_hf_hook")
    return getattr(hook, "hooks", (hook,)) if hook is not None else ()


def streamer_of(model):
    return next(iter(blocks_of(model).values())).streamer


def held(model):
    """Return what all places of `model` hold, and what is called, by identity."""
    tensors = {name: id(tensor) for name, tensor in bigload.named_module_tensors(model, recurse=True)}
    return tensors, {name: id(module.__dict__.get("forward")) for name, module in model.named_modules()}


def run_in_threads(work, *arguments, while_running=lambda: None):
    """Call `work` in a thread for each of `arguments`, tuples; return when all have ended."""
    threads = [threading.Thread(target=work, args=each) for each in arguments]
    for thread in threads:
        thread.start()
    while_running()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def fetchers():
    return [thread for thread in threading.enumerate() if thread.name == "bigload-fetch"]


@contextlib.contextmanager
def settled(model):
    """Check that a model is left as it was: same objects in the same places, nobody uses a block."""
    before = held(model)
    yield
    assert held(model) == before
    assert [block.name for block in blocks_of(model).values() if block.num_users] == []
