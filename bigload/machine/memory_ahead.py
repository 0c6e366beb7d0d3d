"""Memory of a load, faulted in by a thread while the process imports what the load needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from bigload.errors import NotEnoughMemoryError
from bigload.machine.huge_pages import Buffer, allocate, prefault
from bigload.units import MIB

_STEP_BYTES = 8 * MIB
_LEAST_BYTES = 64 * MIB  # less is faulted in sooner than a thread is worth

_current: ContextVar[_MemoryAhead | None] = ContextVar("memory_ahead", default=None)


@contextmanager
def memory_ahead(num_bytes: int) -> Iterator[None]:
    """Fault in memory for the first buffer that is taken in the block, if that is to have about `num_bytes`.

    Faulting in fresh memory can take longer than filling it from the page cache, and needs no lock of Python. The
    memory is given back at once where the first buffer is of another size: there are never two.
    """
    ahead = _started(num_bytes)
    token = _current.set(ahead)
    try:
        yield
    finally:
        _current.reset(token)
        if ahead is not None:
            ahead.end()


def taken_ahead(num_bytes: int) -> Buffer | None:
    """Return the memory of the `memory_ahead` around the call, if `num_bytes` nearly fill it."""
    ahead = _current.get()
    return None if ahead is None else ahead.take(num_bytes)


def _started(num_bytes: int) -> _MemoryAhead | None:
    if num_bytes >= _LEAST_BYTES:
        with suppress(NotEnoughMemoryError):  # the load says so, if that is still true then
            return _MemoryAhead(num_bytes)
    return None


class _MemoryAhead:
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        # The rest is for the alignment of tensors, and faulted in when it is touched.
        self._buffer: Buffer | None = allocate(num_bytes + num_bytes // 64)
        self._is_ended = False
        self._thread = threading.Thread(
            target=self._fault_in, args=(self._buffer,), name="bigload memory ahead", daemon=True
        )
        self._thread.start()

    def take(self, num_bytes: int) -> Buffer | None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._num_bytes <= num_bytes <= len(buffer):
            return buffer
        del buffer
        self.end()
        return None

    def end(self) -> None:
        self._buffer, self._is_ended = None, True
        self._thread.join()

    def _fault_in(self, buffer: Buffer) -> None:
        with suppress(NotEnoughMemoryError):  # the load meets it as well
            for start in range(0, self._num_bytes, _STEP_BYTES):
                if self._is_ended or not prefault(buffer, start, min(start + _STEP_BYTES, self._num_bytes)):
                    return
