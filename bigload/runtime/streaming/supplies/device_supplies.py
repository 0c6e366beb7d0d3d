"""Supplies by copies to one device: reads into one allocation on an accelerator, or `Tensor.to`.

Memory belongs to the stream that it was taken under. Work of that stream needs no care; between it and others there are
events: the copies wait for what ran before in the same memory, the stream that computes waits for the copies, and
before the memory is freed its stream waits for all others. So the next owner may use it at once, blocks of equal size
go round in the same memory, and the host waits for none of this.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from bigload.loading.staging.accelerators import take_memory
from bigload.loading.staging.device_stager import PassingStager
from bigload.loading.staging.device_transfers import Transfers
from bigload.machine.threads.activities import NO_RECORDER
from bigload.runtime.offload.weight_sources import MemoryWeight
from bigload.runtime.streaming.supplies.supply import Supply
from bigload.runtime.streaming.supplies.weight_reads import BLOCK_BYTES, WeightReads
from bigload.runtime.streaming.weights import Weight

_NUM_BLOCKS = 16
"""Two for each thread that reads: one is filled while the other one is copied from."""

_ALIGNMENT = 512
"""As torch's allocator of CUDA memory aligns tensors: some kernels are slower elsewhere, some fail."""

Stream: TypeAlias = Any
Event: TypeAlias = Any
"""Those of the device's vendor."""


class DeviceCopyStream:
    """Pinned memory and stream of all copies to `device`. May be used from several threads.

    A host thread waits only for memory to read into; everything else is ordered by events between streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._has_streams = device.type != "cpu" and hasattr(self._module, "Stream")
        self._lock = threading.Lock()
        self._transfers: Transfers | None = None
        self._end: weakref.finalize[..., DeviceCopyStream] | None = None

    def current_stream(self) -> Stream | None:
        """Return the stream that the calling thread computes on; `None` if the device has no streams."""
        return self._module.current_stream(self.device) if self._has_streams else None

    def copy(self, reads: WeightReads, memory: Sequence[torch.Tensor], *, after: Event | None) -> Event | None:
        """Have all of `reads` read, and copied to `memory` once the event `after` has passed.

        Returns the event of the last copy's arrival; `None` if all have arrived. The copies keep the host memory that
        they read from. After an error, `mark` gives the event for those that were under way.
        """
        transfers = self._opened_transfers()
        if after is not None:
            transfers.wait_for(after)
        for value, buffer, wanted in reads.pinned():
            target = memory[buffer].view(wanted)
            transfers.send_pinned(value.view(-1).view(torch.uint8), target, dtype=value.dtype)
        reads.carry_out(memory, {str(self.device): PassingStager(memory, transfers)})
        return transfers.mark()

    def mark(self) -> Event | None:
        """Return the event for the arrival of everything that has been sent."""
        return None if self._transfers is None else self._transfers.mark()

    def close(self) -> None:
        """Wait until everything has arrived, and free the pinned memory. It is taken again when it is needed."""
        with self._lock:
            self._transfers = None
            if self._end is not None:
                self._end()

    def _opened_transfers(self) -> Transfers:
        with self._lock:
            if self._transfers is None:
                self._transfers = Transfers(
                    self.device, block_bytes=BLOCK_BYTES, num_blocks=_NUM_BLOCKS, recorder=NO_RECORDER
                )
                self._end = weakref.finalize(self, self._transfers.close)
                self._end.atexit = False
            return self._transfers


class _DeviceResidency:
    """Tensors in memory that was taken under the stream `home`; there are no events where it is `None`.

    Attributes:
        memory: What the tensors are made of.
        is_free: The event for the end of all previous users of the memory.
        arrived: The event for the arrival of the last copy, if that is not of the home stream.
    """

    def __init__(self, memory: list[torch.Tensor], home: Stream | None) -> None:
        self.memory = memory
        self.tensors: list[torch.Tensor] = []
        self.is_free: Event | None = None if home is None else home.record_event()
        self.arrived: Event | None = None
        self._home = home
        self._departed: dict[Stream, Event] = {}

    def arrive(self, stream: Stream | None) -> list[torch.Tensor]:
        if stream is not None:
            if self.arrived is not None:
                stream.wait_event(self.arrived)
            if stream != self._home and torch.is_grad_enabled():
                for memory in self.memory:  # a graph of autograd may keep it, and use it there, after the residency
                    memory.record_stream(stream)
        return self.tensors

    def depart(self, stream: Stream | None) -> None:
        if stream is not None and stream != self._home:
            self._departed[stream] = stream.record_event()

    def end(self) -> None:
        """Have the home stream wait for all others, and release the memory: an error may hold this object for long."""
        for event in (self.arrived, *self._departed.values()):
            if event is not None and self._home is not None:
                self._home.wait_event(event)
        self.memory, self.tensors = [], []


class _DeviceSupply(Supply):
    """Weights of a block that are copies on a device while they are resident."""

    def __init__(self, weights: Sequence[Weight], copy_stream: DeviceCopyStream) -> None:
        self.weights = weights
        self._copy_stream = copy_stream
        self._residency: _DeviceResidency | None = None

    def depart(self) -> None:
        """Note how far the calling thread's stream has come, if it is not the one that the memory belongs to."""
        if self._residency is not None:
            self._residency.depart(self._copy_stream.current_stream())

    def drop(self, *, forget: bool) -> None:  # noqa: ARG002  subclasses that read files do
        residency, self._residency = self._residency, None
        if residency is not None:
            residency.end()


class DeviceBufferSupply(_DeviceSupply):
    """Weights of a block on an accelerator, in one allocation while they are resident."""

    def __init__(self, weights: Sequence[Weight], copy_stream: DeviceCopyStream) -> None:
        super().__init__(weights, copy_stream)
        self._reads = WeightReads(weights, str(copy_stream.device))
        self._pieces: list[slice] = []
        stop = 0
        for buffer in self._reads.schedule.buffers:
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
            stop = start + buffer.num_bytes
            self._pieces.append(slice(start, stop))
        self.num_bytes = stop
        self.num_page_bytes = self._reads.num_file_bytes

    def reserve(self) -> None:
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be used outside
            memory = take_memory(str(self._copy_stream.device), self.num_bytes)
        self._residency = _DeviceResidency([memory], self._copy_stream.current_stream())

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
            self.refetch()
        assert self._residency is not None, "reserve() comes first"
        return self._residency.arrive(self._copy_stream.current_stream())

    def drop(self, *, forget: bool) -> None:
        super().drop(forget=forget)
        if forget:
            self._reads.forget()


class TorchSupply(_DeviceSupply):
    """Weights of a block that `Tensor.to` moves: quantised ones, classes of their own, casts by way of a third dtype.

    They are moved by the thread that runs their block, not ahead of it.
    """

    def __init__(self, weights: Sequence[Weight], copy_stream: DeviceCopyStream) -> None:
        super().__init__(weights, copy_stream)
        self.num_bytes = sum(weight.placeholder.nbytes for weight in weights)
        self.num_page_bytes = 0

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights.

        Raises:
            ValueError: one has another shape than the module.
        """
        stream = self._copy_stream.current_stream()
        if self._residency is None:
            with torch.inference_mode(mode=False), torch.no_grad():
                moved = [self._moved(weight) for weight in self.weights]
            self._residency = _DeviceResidency([], stream)
            self._residency.tensors = moved
            self._residency.arrived = None if stream is None else stream.record_event()
        return self._residency.arrive(stream)

    def _moved(self, weight: Weight) -> torch.Tensor:
        source, held = weight.source, weight.placeholder
        value = source.tensor if isinstance(source, MemoryWeight) else source.view().to(source.dtype)
        if value.shape != held.shape:
            raise ValueError(f"{weight.slots[0].name} is of shape {tuple(value.shape)}, expected {tuple(held.shape)}")
        return value.detach().to(device=self._copy_stream.device, dtype=held.dtype)
