"""KV caches, which stay in the workers, each with its heads, and the caller's handles of them.

A handle is passed to the next call as `past_key_values`, and knows the length of the cache. It stays the same object
while workers fill the same cache; when it is garbage, the next call releases their caches.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque

from bigload.errors import ModelNotSendableError


class CacheHandle:
    """Handle of a cache in the workers of one model."""

    def __init__(self, owner: CacheHandles, number: int) -> None:
        self._owner = owner
        self.number = number
        self.length: int | None = 0

    def get_seq_length(self, *_: object) -> int:
        """Return the number of positions of the first layer, as caches of transformers do without an argument.

        Raises:
            ValueError: it has no attention layers, as caches of transformers raise it: states have no positions.
        """
        if self.length is None:
            raise ValueError("this cache has states of one size and no positions: none of its layers is attention")
        return self.length

    def __repr__(self) -> str:
        what = "states" if self.length is None else f"{self.length} positions"
        return f"<cache of {what}, kept by workers>"


class CacheHandles:
    """The caller's side: handles by number, and the numbers of handles that are garbage."""

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[int, CacheHandle] = weakref.WeakValueDictionary()
        self._released: deque[int] = deque()
        self._lock = threading.Lock()

    def number_of(self, value: object) -> object | None:
        """Return the number of `value`, which is sent instead of it, if it is a handle."""
        if not isinstance(value, CacheHandle):
            return None
        if value._owner is not self:
            raise ModelNotSendableError(
                "workers cannot get a cache that others keep: it is of another parallelized model or earlier workers",
                hint="start with no cache",
            )
        return value.number

    def handle(self, stored: object) -> CacheHandle:
        """Return the handle for what `WorkerCaches.number_of` returned."""
        assert isinstance(stored, tuple)
        number, length = stored
        with self._lock:
            handle = self._handles.get(number)
            if handle is None:
                handle = self._handles[number] = CacheHandle(self, number)
                weakref.finalize(handle, self._released.append, number).atexit = False
        handle.length = length
        return handle

    def take_released(self) -> tuple[int, ...]:
        """Return the numbers of handles that became garbage since the last call."""
        return tuple(self._released.popleft() for _ in range(len(self._released)))


class WorkerCaches:
    """The worker's side: caches by number. All workers number theirs in the same order."""

    def __init__(self) -> None:
        self._values: dict[int, object] = {}
        self._numbers: dict[int, int] = {}
        self._count = itertools.count()

    def number_of(self, value: object) -> object | None:
        """Return number and length of `value` if it is a cache; the length of one of states (mamba) is `None`."""
        if not type(value).__name__.endswith("Cache") or not callable(length := getattr(value, "get_seq_length", None)):
            return None
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = next(self._count)
            self._values[number] = value
        try:
            return number, int(length())
        except ValueError:  # what transformers raises for a cache without attention layers
            return number, None

    def value(self, number: object) -> object:
        """Return the cache `number`."""
        assert isinstance(number, int)
        return self._values[number]

    def release(self, numbers: tuple[int, ...]) -> None:
        """Drop the caches `numbers`."""
        for number in numbers:
            self._numbers.pop(id(self._values.pop(number)))
