"""Supply: the way in which some weights of a block get to the device that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bigload.runtime.streaming.weights import Weight


class Supply(Protocol):
    """Brings some weights of one block to the device that it runs on, again and again.

    Calls come in this order, for each stay: `reserve`, `fetch`, then for each forward `arrive` and `depart`, `drop`.
    After a `fetch` that raised comes `drop`. All but `fetch` are called by threads that run the model, with their own
    current stream; never two of them at a time.

    Attributes:
        weights: They, in the order in which `arrive` returns their tensors.
        num_bytes: What they take on the device while they are there; 0 for what is there anyway.
        num_page_bytes: What of the page cache they take: bytes of files that are read, or used where they are.
    """

    weights: Sequence[Weight]
    num_bytes: int
    num_page_bytes: int

    def reserve(self) -> None:
        """Take the memory. Does not wait.

        Raises:
            NotEnoughMemoryError: there is none.
        """

    def fetch(self) -> None:
        """Bring the bytes, in a background thread."""

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights, good for what the calling thread computes from now on. May raise as `fetch` does."""

    def depart(self) -> None:
        """Note that the calling thread has asked for all that it computes with them."""

    def drop(self, *, forget: bool) -> None:
        """Let go of the memory; with `forget`, of what the system has cached of their files too."""
