"""Supply of tied weights: one copy on a device for several blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from bigload.runtime.streaming.supply import Supply
from bigload.runtime.streaming.weights import Weight


class SharedCopy:
    """What is brought for several blocks, with the first of them, and goes with the last."""

    def __init__(self, supply: Supply) -> None:
        self.supply = supply
        self.num_stays = 0
        self.is_here = False
        self.fetching = threading.Lock()


class SharedSupply:
    """The part of one block in what is brought for several (`Supply`).

    `num_bytes` counts it for each of them: who has room for both has room for one.
    """

    def __init__(self, weights: Sequence[Weight], pool: SharedCopy) -> None:
        self.weights = weights
        self._pool = pool
        self._has_part = False
        self.num_bytes = pool.supply.num_bytes
        self.num_page_bytes = pool.supply.num_page_bytes

    def reserve(self) -> None:
        """Take the memory, unless another block has."""
        if not self._pool.num_stays:
            self._pool.is_here = False
            self._pool.supply.reserve()
        self._pool.num_stays += 1
        self._has_part = True

    def fetch(self) -> None:
        """Bring the weights, or wait until another block's fetch has."""
        with self._pool.fetching:
            if not self._pool.is_here:
                self._pool.supply.fetch()
                self._pool.is_here = True

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights."""
        return self._pool.supply.arrive()

    def depart(self) -> None:
        """Note that the calling thread is done."""
        self._pool.supply.depart()

    def drop(self, *, forget: bool) -> None:
        """Let go of them; the last block lets go of the memory."""
        if self._has_part:
            self._has_part = False
            self._pool.num_stays -= 1
            if not self._pool.num_stays:
                self._pool.supply.drop(forget=forget)
