import ctypes
import errno
import mmap
import threading
from functools import partial
from pathlib import Path

import pytest
from lock_interrupts import assert_leaves_no_lock

from bigload.errors import NotEnoughMemoryError
from bigload.machine.memory import huge_pages
from bigload.machine.threads.activities import Phase, Recorder
from bigload.machine.threads.inflight_pool import BlockPool, InflightPool
from bigload.units import MIB


class FullMemory:
    def madvise(self, *arguments):
        ctypes.set_errno(errno.ENOMEM)
        return -1


def waits(recorder):
    return partial(recorder.span, Phase.WAIT)


def test_who_finds_no_room_waits_until_there_is_some_and_the_wait_is_noted():
    inflight, recorder, order = InflightPool(10), Recorder(is_tracing=True), []

    def second():
        with inflight.hold(4, waiting=waits(recorder)):
            order.append("second")

    thread = threading.Thread(target=second)
    with inflight.hold(7, waiting=waits(recorder)):
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert [activity.phase for activity in recorder.activities()] == [Phase.WAIT]


def test_what_is_larger_than_the_bound_goes_alone():
    inflight, recorder = InflightPool(10), Recorder(is_tracing=True)
    with inflight.hold(1000, waiting=waits(recorder)):
        pass
    with inflight.hold(3, waiting=waits(recorder)), inflight.hold(7, waiting=waits(recorder)):
        pass
    assert recorder.activities() == ()


def test_bytes_are_given_back_after_an_error():
    inflight, recorder = InflightPool(10), Recorder(is_tracing=True)
    with pytest.raises(ZeroDivisionError), inflight.hold(10, waiting=waits(recorder)):
        raise ZeroDivisionError
    with inflight.hold(10, waiting=waits(recorder)):
        pass
    assert recorder.activities() == ()


def test_memory_that_is_lent_counts_as_in_flight_and_is_recycled_for_what_fits_into_it():
    pool = InflightPool(3 * MIB)
    with pool.lend(2 * MIB) as first:
        taken = []
        waiter = threading.Thread(target=lambda: taken.append(pool.hold(2 * MIB).__enter__()))
        waiter.start()
        waiter.join(0.05)
        assert not taken
    waiter.join()
    with pool.lend(MIB) as second:
        assert second is first
    pool = InflightPool(MIB)
    with pool.lend(4096) as small, pool.lend(8192) as large:
        assert (len(small), len(large)) == (4096, 8192)


def test_a_pool_lends_what_came_back_and_never_more_than_it_may():
    pool = BlockPool(2, block_bytes=5000)
    assert pool.block_bytes == 2 * mmap.PAGESIZE
    with pool.lend() as first:
        with pool.lend() as second:
            assert first is not second
            assert len(first) == len(second) == pool.block_bytes
            third = []
            waiter = threading.Thread(target=lambda: third.append(pool.lend().__enter__()))
            waiter.start()
            assert not third
        waiter.join()
        assert third == [second]


def test_a_block_comes_back_from_a_user_that_fails():
    pool = BlockPool(1, block_bytes=4096)
    with pytest.raises(RuntimeError), pool.lend() as block:
        raise RuntimeError
    with pool.lend() as again:
        assert again is block


def test_a_pool_that_gets_no_memory_is_as_it_was(monkeypatch):
    pool = BlockPool(1, block_bytes=4096)
    with monkeypatch.context() as patch:
        patch.setattr(huge_pages, "_libc", FullMemory())
        with pytest.raises(NotEnoughMemoryError), pool.lend():
            pass
    with pool.lend() as block:
        assert len(block) == 4096


def test_closing_a_pool_gives_its_memory_back():
    before = mapped_bytes()
    pool = BlockPool(3, block_bytes=8 * MIB)
    with pool.lend(), pool.lend(), pool.lend():
        during = mapped_bytes()
    pool.close()
    assert during >= before + 24 * MIB
    assert mapped_bytes() <= during - 24 * MIB
    with pool.lend() as block:
        assert len(block) == 8 * MIB


def mapped_bytes():
    """Return the bytes of address space that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def test_an_interrupt_never_leaves_the_pool_locked():
    inflight = InflightPool(10)

    def hold():
        with inflight.hold(1):
            pass

    assert_leaves_no_lock(hold)
