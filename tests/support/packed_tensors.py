"""Weights in 8 bits with a scale for each row, in a tensor around two others, as torchao has them."""

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


class RowsOf8Bits(torch.Tensor):
    """A weight of the dtype of `scale`, which it is unpacked to for each operation."""

    @staticmethod
    def __new__(cls, data, scale):
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)
        made.data8, made.scale = data, scale
        return made

    @classmethod
    def of(cls, weight):
        """Return `weight` packed."""
        scale = weight.abs().amax(1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return RowsOf8Bits(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.detach.default:
            return cls(arguments[0].data8, arguments[0].scale)
        plain = tree_map_only(cls, lambda each: each.data8.to(each.scale.dtype) * each.scale, arguments)
        return function(*plain, **(options or {}))


def packed_model():
    """Return layers that run one after another, every second one packed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).eval()
    for layer in model[::2]:
        layer.weight = nn.Parameter(RowsOf8Bits.of(layer.weight.detach()), requires_grad=False)
    return model
