"""Weights that are copied to an accelerator, into memory that torch's own allocator lends and takes back.

Memory belongs to the stream that it was taken under. Work of that stream needs no care; between it and others there are
events: the copies wait for what ran before in the same memory, who computes waits for the copies, and before the memory
goes back its stream waits for all who were elsewhere. So whoever gets it next may use it at once, blocks of equal size
go round in the same memory, and the host waits for none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bigload.loading.accelerators import take_memory
from bigload.runtime.streaming.courier import Courier
from bigload.runtime.streaming.reads import Reads
from bigload.runtime.streaming.supply import Weight

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
        self._stay: _Stay | None = None

    def reserve(self) -> None:
        """Take the memory under the calling thread's stream.

        Raises:
            NotEnoughMemoryError: the device has none left.
        """
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be used outside
            memory = take_memory(str(self._courier.device), self.num_bytes)
        self._stay = _Stay(memory, self._courier.current_stream())

    def fetch(self) -> None:
        """Have the weights copied; what is left to be done then are copies that the device does by itself."""
        stay = self._stay
        assert stay is not None, "reserve() comes first"
        assert stay.memory is not None, "drop() comes last"
        with torch.inference_mode(mode=False), torch.no_grad():
            pieces = [stay.memory[piece] for piece in self._pieces]
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
        stay = self._stay
        assert stay is not None, "reserve() comes first"
        stream = self._courier.current_stream()
        if stream is not None and stay.arrived is not None:
            stream.wait_event(stay.arrived)
        return stay.tensors

    def depart(self) -> None:
        """Note how far the calling thread's stream has come, if it is not the one that the memory belongs to."""
        stay, stream = self._stay, self._courier.current_stream()
        if stay is not None and stream is not None and stream != stay.home:
            stay.departed[stream] = stream.record_event()

    def drop(self, *, forget: bool) -> None:
        """Give the memory back, or leave it to those who kept a view."""
        stay, self._stay = self._stay, None
        if stay is not None:
            stay.end()
        if forget:
            self._reads.forget()


class _Stay:
    """Memory that was taken under the stream `home`, and the moments that count for it.

    Attributes:
        is_free: When those who had the memory before are done.
        arrived: When the copies are.
        departed: When those are who computed with it on other streams, the last time on each.
    """

    def __init__(self, memory: torch.Tensor, home: Any | None) -> None:  # noqa: ANN401  a stream of any vendor
        self.memory: torch.Tensor | None = memory
        self.home = home
        self.tensors: list[torch.Tensor] = []
        self.is_free = None if home is None else home.record_event()
        self.arrived: Any | None = None
        self.departed: dict[Any, Any] = {}

    def end(self) -> None:
        """Have the home stream wait for all others, and let go of the memory: an error may hold the stay for long."""
        for event in (self.arrived, *self.departed.values()):
            if event is not None:
                self.home.wait_event(event)  # type: ignore[union-attr]  # there are no events without streams
        self.memory, self.tensors = None, []
