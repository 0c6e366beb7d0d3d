"""Misses of an LRU cache, which caches of experts are compared with."""

from collections import OrderedDict
from collections.abc import Iterable


def lru_misses(trace: Iterable[tuple[str | int, int]], capacity: int) -> int:
    """Return how many uses would find their expert absent from an LRU cache of `capacity` experts."""
    cache: OrderedDict[tuple[str | int, int], None] = OrderedDict()
    misses = 0
    for key in trace:
        misses += key not in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return misses
