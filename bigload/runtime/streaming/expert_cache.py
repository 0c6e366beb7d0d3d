"""Replacement policy for routed experts: those that are used most stay, within a number of bytes.

Layers run in a cycle, so an LRU cache would evict what is needed next. Counts of uses, from a recorded run and from
this one, tell experts apart that are needed often.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_Entry = tuple[float, int, KeyT]
"""Uses, the negated time of the last one, which no two keys share, and the key. The least of all leaves first."""


class ExpertCache(Generic[KeyT]):
    """Least-frequently-used cache: which keys stay, with their sizes; values are elsewhere.

    Of keys with equal counts the one that was used last leaves first. A key that is colder than all others is not
    admitted. Counts outlive eviction.

    Attributes:
        capacity: Bytes that may stay.
        num_bytes: Bytes that do.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._counts: dict[KeyT, float] = {}
        self._last: dict[KeyT, int] = {}
        self._sizes: dict[KeyT, int] = {}
        self._coldest_first: list[_Entry[KeyT]] = []  # with entries that are out of date
        self._time = 0

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._sizes)

    def set_count(self, key: KeyT, count: float) -> None:
        """Begin with `count` uses of `key`, as recorded in another run."""
        self._counts[key] = count

    def note_use(self, key: KeyT) -> None:
        """Count a use of `key`, admitted or not."""
        self._counts[key] = self._counts.get(key, 0) + 1
        self._touch(key)
        if key in self._sizes:
            self._push(key)

    def admit(self, key: KeyT, num_bytes: int, is_in_use: Callable[[KeyT], bool]) -> list[KeyT] | None:
        """Have `key` stay, and return what leaves instead; `None`, with nothing changed, if `key` is the coldest.

        What `is_in_use` does not leave.
        """
        if key in self._sizes:
            return []
        if key not in self._last:
            self._touch(key)
        excess = self.num_bytes + num_bytes - self.capacity
        rank, taken, leaving = self._entry(key), [], []
        while excess > 0 and self._coldest_first:
            entry = heappop(self._coldest_first)
            other = entry[2]
            if other not in self._sizes or entry != self._entry(other) or other in leaving:
                continue
            taken.append(entry)
            if entry[:2] >= rank[:2]:
                break
            if not is_in_use(other):
                leaving.append(other)
                excess -= self._sizes[other]
        for entry in taken:
            heappush(self._coldest_first, entry)
        if excess > 0:
            return None
        for other in leaving:
            self.discard(other)
        self._sizes[key] = num_bytes
        self.num_bytes += num_bytes
        self._push(key)
        return leaving

    def discard(self, key: KeyT) -> None:
        self.num_bytes -= self._sizes.pop(key, 0)

    def forget(self, key: KeyT) -> None:
        self.discard(key)
        self._counts.pop(key, None)
        self._last.pop(key, None)

    def _entry(self, key: KeyT) -> _Entry[KeyT]:
        return self._counts.get(key, 0), -self._last[key], key

    def _touch(self, key: KeyT) -> None:
        self._time += 1
        self._last[key] = self._time

    def _push(self, key: KeyT) -> None:
        if len(self._coldest_first) > 4 * len(self._sizes) + 64:
            self._coldest_first = [self._entry(each) for each in self._sizes if each != key]
            heapify(self._coldest_first)
        heappush(self._coldest_first, self._entry(key))


def hottest(counts: Mapping[KeyT, float], sizes: Mapping[KeyT, int], capacity: int) -> frozenset[KeyT]:
    """Return the keys with the highest counts above 0 that fit into `capacity` bytes together."""
    chosen: list[KeyT] = []
    for key in sorted(counts, key=lambda each: -counts[each]):
        capacity -= sizes[key]
        if capacity < 0 or counts[key] <= 0:
            break
        chosen.append(key)
    return frozenset(chosen)
