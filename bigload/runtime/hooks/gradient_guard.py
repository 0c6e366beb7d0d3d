"""Gradients of weights that are in memory only while their module runs: an error, since nothing could keep them."""

from __future__ import annotations

from torch import Tensor

from bigload.errors import DispatchedModelError


def refuse_gradients(tensor: Tensor, name: str) -> None:
    """Have `backward` raise `DispatchedModelError` when a gradient reaches `tensor`, if it wants gradients at all.

    Computing with it, and gradients of what else was computed with, are as ever.
    """
    if tensor.requires_grad:
        tensor.register_hook(_GradientRefusal(name))  # type: ignore[no-untyped-call]


class _GradientRefusal:
    """A hook of a tensor. It knows a name alone, so that it keeps nothing alive."""

    __torch_unserializable__ = True  # without which copies of the tensor would warn of it

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _: Tensor) -> None:
        raise DispatchedModelError(
            "a gradient has reached an offloaded weight: it is there only while its module runs, and neither a "
            "gradient of it nor what an optimizer made of it would be kept",
            [self.name],
            hint="freeze what is offloaded, with model.requires_grad_(False), and train adapters beside it; or keep "
            "what is to be trained on a device, by the device map",
        )
