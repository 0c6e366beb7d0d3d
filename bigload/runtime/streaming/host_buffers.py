"""Supply by copies in host memory, for blocks that run on the CPU: cast, or read from unaligned or packed files."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bigload.checkpoint.byte_source import ByteSource
from bigload.loading.schedule import CPU, ReadJob
from bigload.loading.staging.host_blocks import HostStager, bytes_in
from bigload.machine.activities import NO_RECORDER
from bigload.runtime.streaming.buffer_pool import BufferPool, PooledBuffer
from bigload.runtime.streaming.weight_reads import WeightReads
from bigload.runtime.streaming.weights import Weight


class HostBuffers:
    """Memory and cast buffers that all host supplies of a model share."""

    def __init__(self) -> None:
        self.memory = BufferPool()
        self.stager = HostStager([], NO_RECORDER)


class HostBufferSupply:
    """Weights of a block in recycled memory (`Supply`)."""

    def __init__(self, weights: Sequence[Weight], host_buffers: HostBuffers) -> None:
        self.weights = weights
        self._host_buffers = host_buffers
        self._reads = WeightReads(weights, CPU)
        self._memory: list[PooledBuffer] = []
        self._tensors: list[torch.Tensor] = []
        self.num_bytes = self._reads.schedule.bytes_on(CPU)
        self.num_page_bytes = self._reads.num_file_bytes

    def reserve(self) -> None:
        """Take the memory."""
        self._memory = [self._host_buffers.memory.lend(buffer.num_bytes) for buffer in self._reads.schedule.buffers]

    def fetch(self) -> None:
        """Read, and cast, the weights."""
        buffers = [loan.buffer for loan in self._memory]
        self._reads.carry_out(
            buffers, {CPU: _PooledStager(self._host_buffers.stager, [bytes_in(each) for each in buffers])}
        )
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be used outside
            self._tensors = self._reads.tensors([loan.view for loan in self._memory])

    def arrive(self) -> Sequence[torch.Tensor]:
        """Return the weights; read anew if the values in RAM are no longer those that were read."""
        if self._reads.is_stale():
            self.drop(forget=False)
            self.reserve()
            self.fetch()
        return self._tensors

    def depart(self) -> None:
        """Do nothing: the CPU has computed what it was asked for."""

    def drop(self, *, forget: bool) -> None:
        """Let go of the weights: their memory is used again when nobody else holds one."""
        self._tensors, self._memory = [], []
        if forget:
            self._reads.forget()


class _PooledStager:
    """Delivers into the memory of one stay by blocks that are there for all (`loading.engine.Stager`)."""

    def __init__(self, stager: HostStager, memory: Sequence[torch.Tensor]) -> None:
        self._stager = stager
        self._memory = memory

    def deliver(self, job: ReadJob, source: ByteSource) -> None:
        self._stager.deliver_to(self._memory, job, source)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
