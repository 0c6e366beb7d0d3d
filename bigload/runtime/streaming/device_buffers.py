"""Supply by copies to an accelerator, in memory of torch's allocator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigload.loading.staging.accelerators import take_memory
from bigload.runtime.streaming.device_copy_stream import DeviceCopyStream
from bigload.runtime.streaming.device_residency import DeviceResidency
from bigload.runtime.streaming.weight_reads import WeightReads
from bigload.runtime.streaming.weights import Weight

_ALIGNMENT = 512
"""As torch's allocator of CUDA memory aligns tensors: some kernels are slower elsewhere, some fail."""


class DeviceBufferSupply:
    """Weights of a block on an accelerator, in one allocation while they are resident (`Supply`)."""

    def __init__(self, weights: Sequence[Weight], copy_stream: DeviceCopyStream) -> None:
        self.weights = weights
        self._copy_stream = copy_stream
        self._reads = WeightReads(weights, str(copy_stream.device))
        self._pieces: list[slice] = []
        stop = 0
        for buffer in self._reads.schedule.buffers:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + buffer.num_bytes
            self._pieces.append(slice(start, stop))
        self.num_bytes = stop
        self.num_page_bytes = self._reads.num_file_bytes
        self._residency: DeviceResidency | None = None

    def reserve(self) -> None:
        """Take the memory under the calling thread's stream.

        Raises:
            NotEnoughMemoryError: the device has none left.
        """
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be used outside
            memory = take_memory(str(self._copy_stream.device), self.num_bytes)
        self._residency = DeviceResidency([memory], self._copy_stream.current_stream())

    def fetch(self) -> None:
        """Have the weights copied; what is left to be done then are copies that the device does by itself."""
        residency = self._residency
        assert residency is not None, "reserve() comes first"
        with torch.inference_mode(mode=False), torch.no_grad():
            pieces = [residency.memory[0][piece] for piece in self._pieces]
            residency.tensors = self._reads.tensors(pieces)
        try:
            residency.arrived = self._copy_stream.copy(self._reads, pieces, after=residency.is_free)
        except BaseException:
            residency.arrived = self._copy_stream.mark()
            raise
        finally:
            pieces.clear()  # an error holds the frames that it came through, which hold this list

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights; copied anew if the values in RAM are no longer those that were copied."""
        if self._reads.is_stale():
            self.drop(forget=False)
            self.reserve()
            self.fetch()
        assert self._residency is not None, "reserve() comes first"
        return self._residency.arrive(self._copy_stream.current_stream())

    def depart(self) -> None:
        """Note how far the calling thread's stream has come, if it is not the one that the memory belongs to."""
        if self._residency is not None:
            self._residency.depart(self._copy_stream.current_stream())

    def drop(self, *, forget: bool) -> None:
        """Give the memory back, or leave it to those who kept a view."""
        residency, self._residency = self._residency, None
        if residency is not None:
            residency.end()
        if forget:
            self._reads.forget()
