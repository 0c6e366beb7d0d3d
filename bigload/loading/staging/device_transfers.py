"""Bytes from recycled host blocks to one accelerator, while other threads read the next.

Nothing here names a vendor: cuda, xpu and what follows their form (streams and events in `torch.<device type>`) go the
same way. A device without streams, such as mps, is copied to while the caller waits.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch

from bigload.machine.threads.activities import Phase, Recorder


class HostBlock:
    """A piece of host memory on loan: read into `memory`, which is writable, send from it, release it.

    No copy reads it when the block is lent; after a `send` it stays as it is.
    """

    __slots__ = ("_copied", "_has_copies", "_tensor", "memory")

    def __init__(self, tensor: torch.Tensor, copied: Any | None) -> None:  # noqa: ANN401  an event of any vendor
        self.memory = _writable(tensor)
        self._tensor = tensor
        self._copied = copied
        self._has_copies = False


class Transfers:
    """The way to one accelerator: a ring of host blocks, a stream for the copies, an event per block.

    To be made where the destinations are, after them and under the caller's current stream: their memory may have had
    other users, whose kernels that stream still holds, and copies begin only behind those. Then any number of threads
    call `take`, `send`, `release`, each with a block at a time; the maker ends with `finish` and `close`, or by
    leaving the context, when those threads are done. Destinations live until then, also when something failed.

    Who sends again and again, to other destinations each time, keeps the transfers instead: `wait_for` an event that
    says when the new memory is free for writing, send, and `mark` an event that says when all of it has arrived.

    Attributes:
        device: The accelerator, with its index.
        is_pinned: Whether the system locked the blocks in memory. Without, copies are right but may not overlap.
    """

    def __init__(self, device: torch.device, *, block_bytes: int, num_blocks: int, recorder: Recorder) -> None:
        """Take `num_blocks` blocks of `block_bytes` in one piece; multiples of 4096 suit direct reads.

        torch keeps locked memory for the next who asks and takes it in powers of two: choose the product so.
        """
        if block_bytes < 1 or num_blocks < 1:
            raise ValueError(f"{num_blocks} blocks of {block_bytes} bytes; expected 1 or more of 1 or more")
        self.device = torch.empty(0, device=device).device  # "cuda" has no index, its tensors have
        self._recorder = recorder
        self._module = torch.get_device_module(self.device)
        self._stream = None
        if hasattr(self._module, "Stream"):
            self._stream = self._module.Stream(device=self.device)
            self._stream.wait_stream(self._module.current_stream(self.device))
        memory, self.is_pinned = host_memory(num_blocks * block_bytes)
        starts = range(0, num_blocks * block_bytes, block_bytes)
        self._free = deque(HostBlock(memory[start : start + block_bytes], self._new_event()) for start in starts)
        self._lock = threading.RLock()  # taken by itself, as in `InflightPool`: Ctrl-C then leaves it unlocked
        self._returned = threading.Condition(self._lock)
        self._ended_by: BaseException | None = None

    def take(self) -> HostBlock:
        """Return a block that no thread holds and no copy still reads; waits until there is one.

        Raises what `abort` was given, also in threads that wait already.
        """
        with self._recorder.span(Phase.WAIT):
            with self._lock:
                self._returned.wait_for(lambda: self._free or self._ended_by is not None)
                if self._ended_by is not None:
                    raise self._ended_by
                block = self._free.popleft()  # the longest there: its copies end first, the stream keeps their order
            if block._has_copies and block._copied is not None:
                with self._fatal():
                    block._copied.synchronize()
            block._has_copies = False
        return block

    def send(
        self, block: HostBlock, start: int, stop: int, destination: torch.Tensor, *, dtype: torch.dtype | None = None
    ) -> None:
        """Have the bytes from `start` to `stop` of `block` copied into `destination`, which is contiguous.

        They hold elements of `dtype`, of the destination's own when left out. Others are cast on the device, so what
        crosses the bus are the stored bytes. `destination` has as many elements as the bytes; raises RuntimeError if
        not. It holds them after `finish`.
        """
        with self._enqueuing(block, stop - start):
            self._copy(block._tensor[start:stop], destination, dtype)

    def send_rows(
        self,
        block: HostBlock,
        start: int,
        destination: torch.Tensor,
        *,
        num_rows: int,
        row_bytes: int,
        stride_bytes: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Have `num_rows` pieces of `row_bytes`, `stride_bytes` apart, copied into `destination`, one after the other.

        A destination with gaps has the shape of the rows.

        The first begins at `start` of `block`. What lies between them crosses the bus too and is left out on the
        device: it has been read from a disk, which is slower, and no core spends time on it. As `send` otherwise.
        """
        span_bytes = (num_rows - 1) * stride_bytes + row_bytes
        with self._enqueuing(block, span_bytes):
            whole = self._bring(block._tensor[start : start + span_bytes])
            rows = whole.as_strided((num_rows, row_bytes), (stride_bytes, 1))
            if dtype is None or (dtype == destination.dtype and destination.is_contiguous()):
                _bytes_of(destination).view(rows.shape).copy_(rows)
            else:
                values = rows.view(dtype)
                destination.view(values.shape).copy_(values)

    def send_pinned(self, source: torch.Tensor, destination: torch.Tensor, *, dtype: torch.dtype) -> None:
        """Have pinned memory of the caller copied, bytes of elements of `dtype`, without a block in between.

        `source`, bytes in one piece, stays as it is until they have arrived. As `send` otherwise.
        """
        with self._inside(source.numel()):
            self._copy(source, destination, dtype)

    def wait_for(self, event: Any) -> None:  # noqa: ANN401
        """Let copies that are sent from now on wait for `event`, one of this device's."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def mark(self) -> Any | None:  # noqa: ANN401
        """Return an event for the arrival of all that has been sent; `None` if it is there, for want of streams."""
        return None if self._stream is None else self._stream.record_event()

    def release(self, block: HostBlock) -> None:
        """Give `block` back, sent or not. It is lent again when its copies are done."""
        with self._lock:  # blocks line up in the order of their events
            if block in self._free:
                raise ValueError("a block was released that nobody holds")
            if block._has_copies and block._copied is not None:
                with self._fatal():
                    block._copied.record(self._stream)
            self._free.append(block)
            self._returned.notify()

    def abort(self, error: BaseException) -> None:
        """Let no thread wait for a block any more: `take` raises `error`, or what an earlier call gave."""
        with self._lock:
            self._ended_by = self._ended_by or error
            self._returned.notify_all()

    def finish(self) -> None:
        """Wait until everything sent has arrived.

        The calling thread waits, not only its stream: tensors go to users who may use them on any stream, the host
        blocks are about to be freed, and a copy that failed should fail here.
        """
        if self._stream is not None:
            with self._recorder.span(Phase.WAIT):
                self._stream.synchronize()

    def close(self) -> None:
        """Let nobody take a block any more, wait for every copy that reads one, then free them. Safe to repeat.

        The memory of a block stays as long as a view of `HostBlock.memory` does.
        """
        closed = ValueError("a block was asked for after the transfers were closed")
        self.abort(closed)
        self.finish()
        with self._lock:
            self._free.clear()
            self._ended_by = closed  # an error holds its frames, they hold tensors and this: no cycle of it may stay

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(self, source: torch.Tensor, destination: torch.Tensor, dtype: torch.dtype | None) -> None:
        if dtype is None or dtype == destination.dtype:
            _bytes_of(destination).view(source.shape).copy_(source, non_blocking=self._stream is not None)
        else:
            values = self._bring(source).view(dtype)
            destination.view(values.shape).copy_(values)

    @contextmanager
    def _enqueuing(self, block: HostBlock, num_bytes: int) -> Iterator[None]:
        block._has_copies = True  # before the first: one may be under way when the next fails
        with self._inside(num_bytes):
            yield

    @contextmanager
    def _inside(self, num_bytes: int) -> Iterator[None]:
        """Work on the stream of the copies, temporary tensors too: their memory is then reused in its order alone.

        Inference mode, which each thread has for itself, lets destinations be parameters or inference tensors.
        """
        with self._recorder.span(Phase.COPY, num_bytes=num_bytes), torch.inference_mode():
            if self._stream is None:
                yield
            else:
                with self._module.stream(self._stream):
                    yield

    def _bring(self, source: torch.Tensor) -> torch.Tensor:
        """Return the bytes of `source` on the device. They begin there at an address that suits every dtype."""
        raw = torch.empty(source.shape, dtype=torch.uint8, device=self.device)
        return raw.copy_(source, non_blocking=self._stream is not None)

    @contextmanager
    def _fatal(self) -> Iterator[None]:
        """When the device cannot tell whether a block is still read, the block is not lent again, and nobody waits."""
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def _new_event(self) -> Any | None:  # noqa: ANN401
        if self._stream is None:
            return None
        # CUDA's waits spin unless told to sleep, and the cores are wanted for reading.
        return self._module.Event(blocking=True) if self.device.type == "cuda" else self._module.Event()


def host_memory(num_bytes: int) -> tuple[torch.Tensor, bool]:
    """Return `num_bytes` that begin at a page, and whether they are pinned."""
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True), True
    except RuntimeError:  # no accelerator that pins, or a limit on locked memory
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8), False


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _writable(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of the host tensor `tensor` without numpy; they keep its memory alive."""
    array = (ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())
    array._owner = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")
