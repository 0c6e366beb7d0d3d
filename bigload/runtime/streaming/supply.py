"""Protocol of the ways in which weights of a block get to the device that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bigload.runtime.streaming.weights import Weight


class Supply(Protocol):
    """Provider of some weights of one block on the device that it runs on.

    Calls come in this order: `reserve`, `fetch`, then `arrive` and `depart` for each forward, then `drop`, and again.
    After a `fetch` that raised comes `drop`. All but `fetch` are called by threads that run the model, with their own
    current stream; never two of them at a time.

    Attributes:
        weights: The weights, in the order in which `arrive` returns their tensors.
        num_bytes: Their bytes on the device while they are resident; 0 for what is there anyway.
        num_page_bytes: Their bytes in the page cache: of files that are read, or mapped.
    """

    weights: Sequence[Weight]
    num_bytes: int
    num_page_bytes: int

    def reserve(self) -> None:
        """Allocate memory. Does not wait.

        Raises:
            NotEnoughMemoryError: there is none.
        """

    def fetch(self) -> None:
        """Load the bytes, in any thread."""

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights, good for what the calling thread computes from now on. May raise as `fetch` does."""

    def depart(self) -> None:
        """Note that the calling thread has issued all work with them."""

    def drop(self, *, forget: bool) -> None:
        """Release the memory; with `forget`, also drop their files' pages from the page cache."""
