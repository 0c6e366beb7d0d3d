"""Caches of keys and values stay in the workers, of which each has its heads; what the caller holds stands for them.

Such a handle can be given to the next call as `past_key_values`, and says how long the cache is. It is the same object
as long as the workers go on filling the same cache; when nobody refers to it any more, the workers let go of theirs.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque

from bigload.errors import ModelNotSendableError


class KeptValue:
    """A value that the workers of one model keep for it."""

    def __init__(self, owner: HandleTable, number: int) -> None:
        self._owner = owner
        self.number = number
        self.length: int | None = 0

    def get_seq_length(self, *_: object) -> int:
        """Return how many positions are in it: of the first layer, as transformers says it without a layer.

        Raises:
            ValueError: it has no attention layers, as caches of transformers raise it: states have no positions.
        """
        if self.length is None:
            raise ValueError("this cache has states of one size and no positions: none of its layers is attention")
        return self.length

    def __repr__(self) -> str:
        what = "states" if self.length is None else f"{self.length} positions"
        return f"<cache of {what}, kept by workers>"


class HandleTable:
    """What the caller has: handles by number, and the numbers that nobody refers to any more."""

    def __init__(self) -> None:
        self._handles: weakref.WeakValueDictionary[int, KeptValue] = weakref.WeakValueDictionary()
        self._released: deque[int] = deque()
        self._lock = threading.Lock()

    def number_of(self, value: object) -> object | None:
        """Return what goes to the workers instead of `value`, if that is a handle.

        Raises:
            ModelNotSendableError: a handle of other workers.
        """
        if not isinstance(value, KeptValue):
            return None
        if value._owner is not self:
            raise ModelNotSendableError(
                "a cache that others keep",
                "it is of another parallelized model, or of earlier workers",
                hint="start with no cache",
            )
        return value.number

    def handle(self, stored: object) -> KeptValue:
        """Return the handle for what `Keeper.number_of` returned."""
        assert isinstance(stored, tuple)
        number, length = stored
        with self._lock:
            handle = self._handles.get(number)
            if handle is None:
                handle = self._handles[number] = KeptValue(self, number)
                weakref.finalize(handle, self._released.append, number).atexit = False
        handle.length = length
        return handle

    def take_released(self) -> tuple[int, ...]:
        """Return the numbers that nobody refers to since the last time."""
        return tuple(self._released.popleft() for _ in range(len(self._released)))


class Keeper:
    """What a worker has: the values by number. All workers number theirs in the same order."""

    def __init__(self) -> None:
        self._values: dict[int, object] = {}
        self._numbers: dict[int, int] = {}
        self._count = itertools.count()

    def number_of(self, value: object) -> object | None:
        """Return number and length of `value` if it is one that stays; `None` for the length of states (mamba)."""
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
        """Return the value that has `number`."""
        assert isinstance(number, int)
        return self._values[number]

    def release(self, numbers: tuple[int, ...]) -> None:
        """Let go of values."""
        for number in numbers:
            self._numbers.pop(id(self._values.pop(number)))
