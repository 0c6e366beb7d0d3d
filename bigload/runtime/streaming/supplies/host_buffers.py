"""Supply by copies in host memory, for blocks that run on the CPU: cast, or read from unaligned or packed files.

Buffers come from a pool, in which blocks take turns: their pages are present already.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bigload.checkpoint.byte_source import ByteSource
from bigload.loading.scheduling.read_jobs import CPU, ReadJob
from bigload.loading.staging.cpu_stager import HostStager
from bigload.machine.memory.huge_pages import HUGE_PAGE_BYTES, Buffer, allocate
from bigload.machine.threads.activities import NO_RECORDER
from bigload.runtime.streaming.supplies.supply import Supply
from bigload.runtime.streaming.supplies.weight_reads import WeightReads
from bigload.runtime.streaming.weights import Weight


@dataclass(frozen=True, slots=True)
class PooledBuffer:
    """Memory on loan. It comes back when `view`, and all tensors made from `view`, are gone.

    Attributes:
        buffer: The memory, to be filled only while `view` lives: then it is lent again.
    """

    buffer: Buffer
    view: memoryview


class BufferPool:
    """Lends memory, and lends it again once no tensor uses it. May be used from several threads.

    A tensor made from the view by `torch.frombuffer` holds the view as long as its storage lives, whoever holds that: a
    module that gave it out as its result, a graph of autograd, a view of a view. So a tensor that is kept is never
    overwritten, and none has to be given back.

    There is never more of it, lent and waiting to be lent, than there has been on loan at one moment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._returned: deque[Buffer] = deque()  # by finalizers: in any thread, at any time, so without the lock
        self._idle: list[Buffer] = []  # the one that came back first in front
        self._lent_bytes = 0
        self._most_bytes = 0

    def lend(self, num_bytes: int) -> PooledBuffer:
        """Return memory of `num_bytes` or somewhat more, aligned to a page; what it holds is anybody's guess."""
        unit = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
        num_bytes = -(-max(num_bytes, 1) // unit) * unit
        with self._lock:
            self._take_back()
            buffer = self._found(num_bytes) or allocate(num_bytes)
            self._lent_bytes += len(buffer)
            self._most_bytes = max(self._most_bytes, self._lent_bytes)
            while self._idle and self.num_bytes > self._most_bytes:
                del self._idle[0]
        view = memoryview(buffer)
        weakref.finalize(view, self._returned.append, buffer).atexit = False
        return PooledBuffer(buffer, view)

    @property
    def num_bytes(self) -> int:
        """All memory that is lent, or waits to be."""
        return self._lent_bytes + sum(map(len, self._idle))

    def clear(self) -> None:
        with self._lock:
            self._take_back()
            self._idle.clear()
            self._most_bytes = self._lent_bytes

    def _take_back(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._lent_bytes -= len(buffer)
            self._idle.append(buffer)

    def _found(self, num_bytes: int) -> Buffer | None:
        """Return the memory that fits best, if it is not much too large; of several, what came back last."""
        fitting = [buffer for buffer in self._idle if num_bytes <= len(buffer) <= num_bytes + num_bytes // 8]
        if not fitting:
            return None
        best = min(reversed(fitting), key=len)
        self._idle = [buffer for buffer in self._idle if buffer is not best]
        return best


class HostBuffers:
    """Buffers and cast blocks that all host supplies of a model share."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.stager = HostStager([], NO_RECORDER)


class HostBufferSupply(Supply):
    """Weights of a block in recycled memory."""

    def __init__(self, weights: Sequence[Weight], host_buffers: HostBuffers) -> None:
        self.weights = weights
        self._host_buffers = host_buffers
        self._reads = WeightReads(weights, CPU)
        self._memory: list[PooledBuffer] = []
        self._tensors: list[torch.Tensor] = []
        self.num_bytes = self._reads.schedule.bytes_on(CPU)
        self.num_page_bytes = self._reads.num_file_bytes

    def reserve(self) -> None:
        self._memory = [self._host_buffers.pool.lend(buffer.num_bytes) for buffer in self._reads.schedule.buffers]

    def fetch(self) -> None:
        buffers = [loan.buffer for loan in self._memory]
        self._reads.carry_out(
            buffers, {CPU: _PooledStager(self._host_buffers.stager, [memoryview(each) for each in buffers])}
        )
        with torch.inference_mode(mode=False):  # what is made inside of it cannot be used outside
            self._tensors = self._reads.tensors([loan.view for loan in self._memory])

    def arrive(self) -> Sequence[torch.Tensor]:
        if self._reads.is_stale():
            self.refetch()
        return self._tensors

    def drop(self, *, forget: bool) -> None:
        self._tensors, self._memory = [], []
        if forget:
            self._reads.forget()


class _PooledStager:
    """Delivers into the memory of one block, through staging blocks that all share (`loading.engine.Stager`)."""

    def __init__(self, stager: HostStager, memory: Sequence[memoryview]) -> None:
        self._stager = stager
        self._memory = memory

    def deliver(self, job: ReadJob, source: ByteSource) -> None:
        self._stager.deliver_to(self._memory, job, source)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
