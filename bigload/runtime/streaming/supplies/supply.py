"""Supply: provider of some weights of a block on the device that it runs on, alone or for several blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bigload.runtime.streaming.weights import Weight


class Supply:
    """Provider of some weights of one block on the device that it runs on.

    Calls come in this order: `reserve`, `fetch`, then `arrive` and `depart` for each forward, then `drop`, and again.
    After a `fetch` that raised comes `drop`. All but `fetch` are called by threads that run the model, with their own
    current stream; never two of them at a time. What a kind of supply has no work for, it inherits from here.

    Attributes:
        weights: The weights, in the order in which `arrive` returns their tensors.
        num_bytes: Their bytes on the device while they are resident; 0 for values that are on the device anyway.
        num_page_bytes: Their bytes in the page cache: of files that are read, or mapped.
    """

    weights: Sequence[Weight]
    num_bytes: int
    num_page_bytes: int

    def reserve(self) -> None:
        """Allocate memory. Does not wait."""

    def fetch(self) -> None:
        """Load the bytes, in any thread."""

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights, good for what the calling thread computes from now on. May raise as `fetch` does."""
        raise NotImplementedError

    def depart(self) -> None:
        """Note that the calling thread has issued all work with them."""

    def drop(self, *, forget: bool) -> None:
        """Release the memory; with `forget`, also drop their files' pages from the page cache."""
        raise NotImplementedError

    def refetch(self) -> None:
        """Load the weights anew, in place of those that are resident."""
        self.drop(forget=False)
        self.reserve()
        self.fetch()


class SharedCopy:
    """One copy of a tied weight for several blocks: loaded with the first of them, dropped with the last."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        self.num_blocks = 0
        self.is_loaded = False
        self.loading = threading.Lock()


class SharedSupply(Supply):
    """The part of one block in a copy that several blocks share.

    `num_bytes` counts the copy for each of them: memory for both is memory for one.
    """

    def __init__(self, weights: Sequence[Weight], shared: SharedCopy) -> None:
        self.weights = weights
        self.num_bytes = shared.supply.num_bytes
        self.num_page_bytes = shared.supply.num_page_bytes
        self._shared = shared
        self._has_part = False

    def reserve(self) -> None:
        shared = self._shared
        if not shared.num_blocks:
            shared.is_loaded = False
            shared.supply.reserve()
        shared.num_blocks += 1
        self._has_part = True

    def fetch(self) -> None:
        with self._shared.loading:
            if not self._shared.is_loaded:
                self._shared.supply.fetch()
                self._shared.is_loaded = True

    def arrive(self) -> Sequence[torch.Tensor]:
        return [*self._shared.supply.arrive()] * len(self.weights)

    def depart(self) -> None:
        self._shared.supply.depart()

    def drop(self, *, forget: bool) -> None:
        if self._has_part:
            self._has_part = False
            self._shared.num_blocks -= 1
            if not self._shared.num_blocks:
                self._shared.supply.drop(forget=forget)
