"""The experts that are used most stay, within the bytes that there are, with fewer misses than an LRU cache."""

import random

from hypothesis import given
from hypothesis import strategies as st
from lru_cache import lru_misses

from bigload.runtime.streaming.expert_cache import ExpertCache, hottest


def never(_):
    return False


def use(cache, key, num_bytes=1):
    """Return whether `key` had to be loaded."""
    is_absent = key not in cache
    cache.note_use(key)
    cache.admit(key, num_bytes, never)
    return is_absent


def routed(num_tokens, seed, num_layers=6, num_experts=32, top_k=4):
    """Return the experts that tokens use, layer by layer, some experts of each layer much more often than others."""
    generator = random.Random(0)
    orders = [generator.sample(range(num_experts), num_experts) for _ in range(num_layers)]
    weights = [1 / (rank + 1) for rank in range(num_experts)]
    generator.seed(seed)
    for _ in range(num_tokens):
        for layer, order in enumerate(orders):
            chosen = set()
            while len(chosen) < top_k:
                chosen.update(generator.choices(order, weights))
            yield from ((layer, number) for number in sorted(chosen))


def test_with_recorded_counts_misses_are_30_percent_fewer_than_lru_on_the_same_trace():
    capacity = 48  # of 192
    recorded = {}
    for key in routed(300, seed=1):
        recorded[key] = recorded.get(key, 0) + 1
    trace = list(routed(200, seed=2))
    informed, cold = ExpertCache(capacity), ExpertCache(capacity)
    for key, count in recorded.items():
        informed.set_count(key, count)
    misses = sum(use(informed, key) for key in trace)
    assert misses <= 0.7 * lru_misses(trace, capacity)
    assert misses <= sum(use(cold, key) for key in trace) <= 0.8 * lru_misses(trace, capacity)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=200),
    st.integers(0, 15),
    st.lists(st.integers(0, 9), max_size=3),
)
def test_it_keeps_its_bound_and_what_is_in_use(uses, capacity, held):
    cache, sizes = ExpertCache(capacity), {}
    for key, num_bytes in uses:
        size = sizes.setdefault(key, num_bytes)
        before = set(cache)
        cache.note_use(key)
        leaving = cache.admit(key, size, held.__contains__)
        assert set(cache) == (before if leaving is None else (before | {key}) - set(leaving))
        assert not set(leaving or ()) & set(held)
        assert cache.num_bytes == sum(sizes[each] for each in cache) <= capacity


@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 8))
def test_of_keys_of_one_size_those_with_most_uses_stay(uses, capacity):
    cache, counts = ExpertCache(capacity), {}
    for key in uses:
        counts[key] = counts.get(key, 0) + 1
        use(cache, key)
    kept = [counts[key] for key in cache]
    assert sorted(kept, reverse=True) == sorted(counts.values(), reverse=True)[:capacity]


def test_of_equals_the_one_used_last_leaves_first():
    cache = ExpertCache(2)
    for key in "abc" * 3:
        use(cache, key)
    assert set(cache) == {"a", "b"}


def test_what_was_forgotten_begins_anew():
    cache = ExpertCache(1)
    for key in "aaab":
        use(cache, key)
    assert set(cache) == {"a"}
    cache.forget("a")
    assert use(cache, "a")
    assert cache.num_bytes == 1


def test_the_hottest_are_chosen_until_the_bytes_are_used_up():
    counts = {"a": 5, "b": 9, "c": 0, "d": 1}
    assert hottest(counts, dict.fromkeys(counts, 10), 20) == {"a", "b"}
    assert hottest(counts, dict.fromkeys(counts, 10), 100) == {"a", "b", "d"}
    assert hottest(counts, dict.fromkeys(counts, 10), 9) == frozenset()
