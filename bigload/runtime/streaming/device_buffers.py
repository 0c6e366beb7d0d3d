"""Weights that are copied to an accelerator, into memory that torch's own allocator lends and takes back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigload.loading.staging.accelerators import take_memory
from bigload.runtime.streaming.device_copy_stream import Courier
from bigload.runtime.streaming.device_residency import DeviceStay
from bigload.runtime.streaming.weight_reads import Reads
from bigload.runtime.streaming.weights import Weight

_ALIGNMENT = 512
"""As torch's allocator of CUDA memory aligns tensors: some kernels are slower elsewhere, some fail."""


class DeviceCopies:
    """Weights of a block on an accelerator, in one piece of memory for each stay (`Supply`)."""

    def __init__(self, weights: Sequence[Weight], courier: Courier) -> None:
        self.weights = weights
        self._courier = courier
        self._reads = Reads(weights, str(courier.device))
        self._pieces: list[slice] = []
        stop = 0
        for buffer in self._reads.schedule.buffers:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + buffer.num_bytes
            self._pieces.append(slice(start, stop))
        self.num_bytes = stop
        self.num_page_bytes = self._reads.num_file_bytes
        self._stay: DeviceStay | None = None

    def reserve(self) -> None:
        """Take the memory under the calling thread's stream.

        Raises:
            NotEnoughMemoryError: the device has none left.
        """
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be used outside
            memory = take_memory(str(self._courier.device), self.num_bytes)
        self._stay = DeviceStay([memory], self._courier.current_stream())

    def fetch(self) -> None:
        """Have the weights copied; what is left to be done then are copies that the device does by itself."""
        stay = self._stay
        assert stay is not None, "reserve() comes first"
        with torch.inference_mode(mode=False), torch.no_grad():
            pieces = [stay.memory[0][piece] for piece in self._pieces]
            stay.tensors = self._reads.tensors(pieces)
        try:
            stay.arrived = self._courier.bring(self._reads, pieces, after=stay.is_free)
        except BaseException:
            stay.arrived = self._courier.mark()
            raise
        finally:
            pieces.clear()  # an error holds the frames that it came through, which hold this list

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights; copied anew if the values in RAM are no longer those that were copied."""
        if self._reads.is_stale():
            self.drop(forget=False)
            self.reserve()
            self.fetch()
        assert self._stay is not None, "reserve() comes first"
        return self._stay.arrive(self._courier.current_stream())

    def depart(self) -> None:
        """Note how far the calling thread's stream has come, if it is not the one that the memory belongs to."""
        if self._stay is not None:
            self._stay.depart(self._courier.current_stream())

    def drop(self, *, forget: bool) -> None:
        """Give the memory back, or leave it to those who kept a view."""
        stay, self._stay = self._stay, None
        if stay is not None:
            stay.end()
        if forget:
            self._reads.forget()
