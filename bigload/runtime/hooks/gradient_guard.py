"""Gradients of weights that are in memory only while their module runs: an error, since nothing could keep them."""

from __future__ import annotations

from torch import Tensor

from bigload.errors import OffloadedTrainingError


def refuse_gradients(tensor: Tensor, name: str) -> None:
    """Have `backward` raise `OffloadedTrainingError` when a gradient reaches `tensor`, if it wants gradients at all.

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
        raise OffloadedTrainingError(self.name)
