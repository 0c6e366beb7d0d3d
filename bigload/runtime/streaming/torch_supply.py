"""Supply by `Tensor.to`: for quantised weights, classes of their own, and casts by way of a third dtype.

They are moved when their block runs, not ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigload.runtime.offload.stored_weights import FileWeight
from bigload.runtime.streaming.device_residency import DeviceResidency
from bigload.runtime.streaming.weights import Weight


class TorchSupply:
    """Weights of a block that are moved by `Tensor.to`, in the thread that runs it (`Supply`).

    Args:
        weights: They.
        device: Where to.
        current_stream: Returns the calling thread's stream there; `None` if the device has no streams.
    """

    def __init__(
        self, weights: Sequence[Weight], device: torch.device, current_stream: Callable[[], Any | None]
    ) -> None:
        self.weights = weights
        self._device = device
        self._current_stream = current_stream
        self._residency: DeviceResidency | None = None
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
        stream = self._current_stream()
        if self._residency is None:
            with torch.inference_mode(mode=False), torch.no_grad():
                moved = [self._moved(weight) for weight in self.weights]
            self._residency = DeviceResidency([], stream)
            self._residency.tensors = moved
            self._residency.arrived = None if stream is None else stream.record_event()
        return self._residency.arrive(stream)

    def depart(self) -> None:
        """Note how far the calling thread's stream has come."""
        if self._residency is not None:
            self._residency.depart(self._current_stream())

    def drop(self, *, forget: bool) -> None:  # noqa: ARG002  what they were read from is small
        """Let go of them."""
        residency, self._residency = self._residency, None
        if residency is not None:
            residency.end()

    def _moved(self, weight: Weight) -> torch.Tensor:
        source, held = weight.source, weight.placeholder
        value = source.view().to(source.dtype) if isinstance(source, FileWeight) else source.tensor
        if value.shape != held.shape:
            raise ValueError(f"{weight.slots[0].name} is of shape {tuple(value.shape)}, expected {tuple(held.shape)}")
        return value.detach().to(device=self._device, dtype=held.dtype)
