"""A small model whose experts are rows of the same parameters, in the form that transformers 5 gives such modules."""

import functools
from types import SimpleNamespace

import torch
from torch import nn

WIDTH, INNER, NUM_EXPERTS, TOP_K = 8, 16, 12, 2


def choosable(kind):
    """Give `kind` an experts function that can be chosen, by default one that needs all experts at once."""
    loop, init = kind.forward, kind.__init__

    @functools.wraps(init)
    def __init__(self, *args, **kwargs):  # noqa: N807
        init(self, *args, **kwargs)
        self.config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.has_gate = self.has_bias = self.is_concatenated = True
        self.is_transposed = False

    @functools.wraps(loop)
    def forward(self, *args, **kwargs):
        whole = {key: value.clone() for key, value in self._parameters.items()}
        return torch.func.functional_call(_Loop(self, loop), whole, args, kwargs)

    kind.__init__, kind.forward = __init__, forward
    return kind


class _Loop(nn.Module):
    def __init__(self, module, loop):
        super().__init__()
        self._parameters = dict(module._parameters)
        self.loop = functools.partial(loop, self)
        self.num_experts = module.num_experts

    def forward(self, *args, **kwargs):
        return self.loop(*args, **kwargs)


@choosable
class Experts(nn.Module):
    def __init__(self, num_experts=NUM_EXPERTS):
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 2 * INNER, WIDTH) / 4)
        self.gate_up_proj_bias = nn.Parameter(torch.randn(num_experts, 2 * INNER) / 4)
        self.down_proj = nn.Parameter(torch.randn(num_experts, WIDTH, INNER) / 4)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for number in top_k_index.unique():
            token, position = torch.where(top_k_index == number)
            gate_up = nn.functional.linear(
                hidden_states[token], self.gate_up_proj[number], self.gate_up_proj_bias[number]
            )
            gate, up = gate_up.chunk(2, dim=-1)
            found = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[number])
            out.index_add_(0, token, found * top_k_weights[token, position, None])
        return out


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = Experts()

    def forward(self, x):
        weights, chosen = self.router(self.norm(x)).softmax(-1).topk(TOP_K, dim=-1)
        return x + self.experts(self.norm(x), chosen, weights)


class Mixture(nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self, num_layers=3):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


EXPERT_BYTES = (2 * INNER * WIDTH + 2 * INNER + WIDTH * INNER) * 4


def mixture(num_layers=3, dtype=torch.float32):
    torch.manual_seed(0)
    return Mixture(num_layers).eval().to(dtype)


def fetched_experts(model):
    """Return the names of the experts that have been loaded, a name for each time; two threads load, in any order."""
    return [span.name for span in model.bigload_stats().spans if span.kind == "fetch" and ".experts." in span.name]


def chosen_experts(model, ids):
    """Return the names of the experts that `model`, which has all weights, uses for `ids`."""
    found = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: found.extend(f"{name}.{number}" for number in args[1].unique().tolist())
        )
        for name, module in model.named_modules()
        if isinstance(module, Experts)
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return found
