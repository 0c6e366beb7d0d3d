"""Caches stay where they are; what stands for them is one object per cache, and lets go of it when it goes."""

import gc

import pytest

from bigload.errors import ModelNotSendableError
from bigload.parallel.workers.messages import pack, unpack
from bigload.parallel.workers.worker_caches import CacheHandles, WorkerCaches
from worker_models import CountingCache


def test_a_cache_goes_out_as_a_handle_and_comes_back_as_itself():
    keeper, table, cache = WorkerCaches(), CacheHandles(), CountingCache()
    out = unpack(pack({"cache": cache}, persistent_id=keeper.number_of), persistent_load=table.handle)
    back = unpack(pack([out["cache"]], persistent_id=table.number_of), persistent_load=keeper.value)
    assert back == [cache]


def test_a_cache_that_grows_keeps_its_handle():
    keeper, table, cache = WorkerCaches(), CacheHandles(), CountingCache()
    handle = table.handle(keeper.number_of(cache))
    cache.seen.append(1)
    assert handle.get_seq_length() == 0
    assert table.handle(keeper.number_of(cache)) is handle
    assert handle.get_seq_length(3) == 1


def test_a_handle_that_goes_lets_go_of_its_cache():
    keeper, table = WorkerCaches(), CacheHandles()
    first, second = (table.handle(keeper.number_of(CountingCache())) for _ in range(2))
    del first
    gc.collect()
    released = table.take_released()
    assert released == (0,)
    assert table.take_released() == ()
    keeper.release(released)
    assert isinstance(keeper.value(second.number), CountingCache)
    with pytest.raises(KeyError):
        keeper.value(0)


def test_a_handle_of_other_workers_is_refused():
    handle = CacheHandles().handle((0, 3))
    assert repr(handle) == "<cache of 3 positions, kept by workers>"
    with pytest.raises(ModelNotSendableError, match="another parallelized model"):
        CacheHandles().number_of(handle)


def test_other_values_travel():
    assert WorkerCaches().number_of({"a": 1}) is None
    assert WorkerCaches().number_of("DynamicCache") is None
    assert CacheHandles().number_of(object()) is None


def test_a_cache_of_states_is_kept_though_it_has_no_length():
    class StatesCache:
        def get_seq_length(self):
            raise ValueError("`get_seq_length` can only be called on Attention layers")

    keeper, handles = WorkerCaches(), CacheHandles()
    cache = StatesCache()
    stored = keeper.number_of(cache)
    handle = handles.handle(stored)
    assert keeper.value(handles.number_of(handle)) is cache
    assert keeper.number_of(cache) == stored
    assert repr(handle) == "<cache of states, kept by workers>"
    with pytest.raises(ValueError, match="no positions"):
        handle.get_seq_length()
