"""Kinds of layers by their use of the weight, a product or a look-up; found by trying, not by class names."""

from __future__ import annotations

import copy
import inspect
from enum import Enum

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTH = 4
"""Of the small weights on which modules are tried: square, so that whoever knows his sizes is right either way."""


class LayerKind(Enum):
    """Use of a weight by its layer.

    `LINEAR`: outputs x inputs, as in `nn.Linear`. `TRANSPOSED`: inputs x outputs, as in the `Conv1D` of GPT-2.
    `LOOKUP`: a table, of which a row is returned for each index, perhaps scaled, as in `nn.Embedding`.
    """

    LINEAR = "linear"
    TRANSPOSED = "transposed"
    LOOKUP = "lookup"

    @property
    def out_dim(self) -> int:
        """The dimension of the weight along which its outputs are."""
        return 0 if self is LayerKind.LINEAR else 1

    @property
    def in_dim(self) -> int:
        """The dimension of the weight along which its inputs, or rows, are."""
        return 1 - self.out_dim


def layer_kind(module: nn.Module) -> LayerKind | None:
    """Return how `module` uses its weight, `None` if it is no layer with a matrix `weight` and at most a `bias`."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 2 or module._modules or "parametrizations" in module.__dict__:
        return None
    if any(parameter is not None and name not in ("weight", "bias") for name, parameter in module._parameters.items()):
        return None
    if type(module).forward is nn.Linear.forward and "forward" not in module.__dict__:
        return LayerKind.LINEAR
    with torch.device("cpu"):
        return _tried(_small(module))


def _small(module: nn.Module) -> nn.Module:
    """Return `module` as it would be with a small square weight."""
    sizes = set(module._parameters["weight"].shape)  # type: ignore[union-attr]
    small = copy.copy(module)
    small.__dict__ = {
        name: _WIDTH if type(value) is int and value in sizes else value for name, value in module.__dict__.items()
    }
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH, generator=generator), requires_grad=False)
    bias = nn.Parameter(torch.randn(_WIDTH, generator=generator), requires_grad=False)
    has_bias = module._parameters.get("bias") is not None
    small.__dict__["_buffers"] = {
        name: torch.ones(buffer.shape) if buffer is not None and buffer.is_meta else buffer
        for name, buffer in module._buffers.items()
    }
    small.__dict__["_parameters"] = {"weight": weight, "bias": bias if has_bias else None}
    if isinstance(module, nn.Embedding):
        small.__dict__["padding_idx"] = None  # whose row is like others in a forward
    return small


def _tried(small: nn.Module) -> LayerKind | None:
    weight, bias = small._parameters["weight"], small._parameters["bias"]
    assert weight is not None
    inputs = torch.linspace(-1, 1, 3 * _WIDTH).view(3, _WIDTH)
    found = _output(small, inputs)
    if found is not None:
        if _equal(found, functional.linear(inputs, weight, bias)):
            return LayerKind.LINEAR
        return LayerKind.TRANSPOSED if _equal(found, functional.linear(inputs, weight.T, bias)) else None
    return LayerKind.LOOKUP if bias is None and _is_lookup(small) else None


def _is_lookup(small: nn.Module) -> bool:
    """Return whether tables that hold some of the rows, and zeros instead of others, give outputs that add up."""
    if len(inspect.signature(small.forward).parameters) != 1 or getattr(small, "max_norm", None) is not None:
        return False
    weight = small._parameters["weight"]
    assert weight is not None
    indices = torch.tensor([[3, 0, 2], [1, 1, 3]])
    whole = _output(small, indices)
    halves = []
    for rows in (slice(0, 2), slice(2, 4)):
        part = torch.zeros_like(weight)
        part[rows] = weight[rows]
        small._parameters["weight"] = nn.Parameter(part, requires_grad=False)
        halves.append(_output(small, indices))
    if whole is None or whole.shape != (*indices.shape, _WIDTH) or halves[0] is None or halves[1] is None:
        return False
    scale = whole[0, 1] / weight[0]
    return _equal(halves[0] + halves[1], whole) and _equal(whole, weight[indices] * scale)


def _output(module: nn.Module, inputs: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            found = module(inputs)
    except Exception:  # whatever a module of others says to inputs that are not for it
        return None
    return found if isinstance(found, Tensor) else None


def _equal(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool(torch.allclose(found, expected, rtol=1e-5, atol=1e-6))
