"""Weights that torch itself has to bring: quantised, in classes of their own, or cast by way of a third dtype.

They come when their block asks for them, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigload.runtime.stored_weights import Place
from bigload.runtime.streaming.supply import Weight


class Moves:
    """Weights of a block that are moved by `Tensor.to`, in the thread that runs it (`Supply`)."""

    def __init__(self, weights: Sequence[Weight], device: torch.device) -> None:
        self.weights = weights
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self.num_bytes = sum(weight.placeholder.numel() * weight.placeholder.element_size() for weight in weights)
        self.num_page_bytes = 0

    def reserve(self) -> None:
        """Do nothing yet."""

    def fetch(self) -> None:
        """Do nothing yet."""

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights.

        Raises:
            ValueError: one has another shape than the module.
            ReadError: a file is no longer the one that was opened.
        """
        if not self._tensors:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._tensors = [self._moved(weight) for weight in self.weights]
        return self._tensors

    def depart(self) -> None:
        """Do nothing."""

    def drop(self, *, forget: bool) -> None:  # noqa: ARG002  what they were read from is small
        """Let go of them."""
        self._tensors = []

    def _moved(self, weight: Weight) -> torch.Tensor:
        source, held = weight.source, weight.placeholder
        value = source.view().to(source.dtype) if isinstance(source, Place) else source.tensor
        if value.shape != held.shape:
            raise ValueError(f"{weight.slots[0].name} is of shape {tuple(value.shape)}, expected {tuple(held.shape)}")
        return value.detach().to(device=self._device, dtype=held.dtype)
