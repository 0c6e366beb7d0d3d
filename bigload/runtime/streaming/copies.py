"""Weights that are copied for each stay: to another device, to another dtype, or from where they cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigload.runtime.offload_store import AtHand
from bigload.runtime.streaming.supply import Weight


class Courier:
    """What all copies to one device have in common."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Copies:
    """Weights of a block that are copied to the device it runs on (`Supply`)."""

    def __init__(self, weights: Sequence[Weight], courier: Courier) -> None:
        self.weights = weights
        self._courier = courier
        self._tensors: list[torch.Tensor] = []
        self.num_bytes = sum(weight.placeholder.numel() * weight.placeholder.element_size() for weight in weights)

    def reserve(self) -> None:
        """Take the memory."""

    def fetch(self) -> None:
        """Copy the weights."""
        self._tensors = [
            (weight.source.tensor if isinstance(weight.source, AtHand) else weight.source.view()).to(
                device=self._courier.device, dtype=weight.placeholder.dtype
            )
            for weight in self.weights
        ]

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights."""
        return self._tensors

    def depart(self) -> None:
        """Do nothing."""

    def drop(self, *, forget: bool) -> None:
        """Let go of them."""
        self._tensors = []
