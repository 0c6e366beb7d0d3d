"""Bounded pool of the bytes that are read or written at one moment, and of the recycled memory they are staged in."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from bigload.machine.memory.huge_pages import HUGE_PAGE_BYTES, Buffer, allocate, prefault
from bigload.units import MIB

LENT_BLOCK_BYTES = 8 * MIB


class InflightPool:
    """Threads hold at most `limit_bytes` at one moment, as a number or as memory; a larger request goes alone.

    Memory is allocated at its first use, and faulted in unless parts of it may stay unused (`is_prefaulted`). The
    buffer returned last is lent first: a processor's cache may still hold it. Where all requests are for `cut_bytes`
    each, a huge page is cut into as many buffers of that size as fit.
    """

    def __init__(self, limit_bytes: int, *, is_prefaulted: bool = True, cut_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._is_prefaulted = is_prefaulted
        self._num_cut = max(min(HUGE_PAGE_BYTES, limit_bytes) // cut_bytes, 1) if cut_bytes else 1
        self._held = 0
        # `with` takes the lock itself: Ctrl-C inside of `Condition.__enter__`, which is Python, would leave it locked.
        self._lock = threading.RLock()
        self._freed = threading.Condition(self._lock)
        self._idle: list[Buffer] = []

    @contextmanager
    def hold(
        self, num_bytes: int, *, waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Count `num_bytes` as in flight while the context lasts; first wait for room, inside `waiting()`."""
        with self._lock:
            if not self._has_room(num_bytes):
                with waiting():
                    self._freed.wait_for(lambda: self._has_room(num_bytes))
            self._held += num_bytes
        try:
            yield
        finally:
            with self._lock:
                self._held -= num_bytes
                self._freed.notify_all()

    @contextmanager
    def lend(self, num_bytes: int) -> Iterator[Buffer]:
        """Lend at least `num_bytes` of memory, which count as in flight. Their content is the last user's."""
        with self.hold(num_bytes):
            buffer = self._take(num_bytes)
            try:
                yield buffer
            finally:
                self._idle.append(buffer)

    def close(self) -> None:
        """Return the memory that is not lent to the system; the pool can be used again."""
        self._idle.clear()

    def _take(self, num_bytes: int) -> Buffer:
        try:
            buffer = self._idle.pop()  # atomic: no lock
        except IndexError:
            buffer = bytearray()
        if len(buffer) < num_bytes:
            buffer = allocate(num_bytes if self._num_cut == 1 else HUGE_PAGE_BYTES)
            if self._is_prefaulted:
                prefault(buffer, 0, num_bytes * self._num_cut)
            if self._num_cut > 1:
                whole = memoryview(buffer)
                buffer, *others = (whole[at : at + num_bytes] for at in range(0, self._num_cut * num_bytes, num_bytes))
                self._idle.extend(others)
        return buffer

    def _has_room(self, num_bytes: int) -> bool:
        return self._held == 0 or self._held + num_bytes <= self._limit


class BlockPool:
    """Pool of at most `num_blocks` page-aligned blocks of one size; a thread waits while none is free.

    Small blocks share huge pages: direct reads and writes of these are faster, and a few stay in a processor's cache.
    """

    def __init__(self, num_blocks: int, *, block_bytes: int = LENT_BLOCK_BYTES, is_prefaulted: bool = True) -> None:
        self.block_bytes = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._pool = InflightPool(
            num_blocks * self.block_bytes, is_prefaulted=is_prefaulted, cut_bytes=self.block_bytes
        )

    def lend(self) -> AbstractContextManager[Buffer]:
        """Lend a block for as long as the context lasts. Its content is the last user's."""
        return self._pool.lend(self.block_bytes)

    def close(self) -> None:
        """Return the blocks that are not lent to the system; the pool can be used again."""
        self._pool.close()
