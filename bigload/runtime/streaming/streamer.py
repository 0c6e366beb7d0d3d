"""Scheduler that prefetches, loads and evicts the weights of a model's blocks while others compute.

One lock guards all decisions; only loading itself runs outside. Memory is bounded by bytes: for blocks that run, for
resident blocks, and for the prefetch window.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, NamedTuple

import torch

from bigload.errors import NotEnoughMemoryError
from bigload.runtime.streaming.expert_cache import ExpertCache, hottest
from bigload.runtime.streaming.prefetch_thread import PrefetchThread
from bigload.runtime.streaming.run_log import RunLog, RunStats
from bigload.runtime.streaming.run_order import RunOrder
from bigload.runtime.streaming.streamed_block import Residency, StreamedBlock
from bigload.runtime.streaming.streaming_limits import StreamingLimits, StreamOptions, chosen_evenly, limits_for
from bigload.runtime.streaming.supplies.supply import Supply
from bigload.runtime.streaming.supplies.supply_factory import SupplyFactory
from bigload.runtime.streaming.weights import Weight

_NOTHING = StreamingLimits(
    prefetch_bytes=0, resident_bytes=0, expert_bytes=0, expert_prefetch_bytes=0, uncached=frozenset()
)
"""Limits until a block runs."""


class _Forward(NamedTuple):
    """A forward of the model: the resident blocks that it holds, and how many its thread had entered before it."""

    held: list[StreamedBlock]
    num_entered: int


_living: weakref.WeakSet[Streamer] = weakref.WeakSet()


class Streamer:
    """Scheduler of the blocks of one model. May be used from several threads."""

    def __init__(self, options: StreamOptions, whole_experts: tuple[str, ...] = ()) -> None:
        self.log = RunLog()
        self._whole_experts = whole_experts
        self._options = options
        self._recorded = {} if options.expert_stats is None else options.expert_stats.counts
        self._blocks: dict[StreamedBlock, None] = {}
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._prefetch_thread = PrefetchThread(self, Streamer._fetch_ahead)
        self._supply_factory = SupplyFactory()
        self._tied: frozenset[int] | None = None
        self._limits = _NOTHING
        self._order: RunOrder[StreamedBlock] = RunOrder([])
        self._held_bytes = 0
        self._num_absent = 0  # of the blocks that are not routed
        self._prefetched: dict[StreamedBlock, None] = {}  # loaded or loading, not kept, not in use; oldest first
        self._cached_experts: ExpertCache[StreamedBlock] = ExpertCache()
        self._kept: tuple[StreamedBlock, ...] = ()
        self._here = threading.local()
        self._under_way: dict[int, list[StreamedBlock]] = {}  # what each forward of the model holds
        self._has_succeeded = False
        self._hot: frozenset[StreamedBlock] = frozenset()  # experts that a recorded run used most, as many as may stay
        _living.add(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self._options, "whole_experts": self._whole_experts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a streamer of a copied model, whose blocks add themselves."""
        self.__init__(**state)  # type: ignore[misc]

    def add(self, block: StreamedBlock) -> None:
        """Have `block` streamed. The order of adding is the first guess at the order in which blocks run."""
        with self._lock:
            self._blocks[block] = None
            if block.is_routed:
                self._cached_experts.set_count(block, self._recorded.get(block.name, 0))
                module, _, number = block.name.rpartition(".")
                kept = self._options.resident_experts.get(module, ())
                block.is_kept = bool(kept) and number.isdecimal() and int(number) in kept
            self._limits, self._tied = _NOTHING, None

    def remove(self, block: StreamedBlock) -> None:
        with self._lock:
            if block in self._blocks:
                del self._blocks[block]
                self._limits = _NOTHING
                self._evict_and_wait(block)
                self._cached_experts.forget(block)
                if not self._blocks:
                    self._supply_factory.close()

    def supplies_for(self, weights: Sequence[Weight], device: torch.device) -> tuple[Supply, ...]:
        if self._tied is None:
            placeholders = [{id(weight.placeholder) for weight in block.weights()} for block in self._blocks]
            counts = Counter(chain.from_iterable(placeholders))
            self._tied = frozenset(key for key, count in counts.items() if count > 1)
        return self._supply_factory.supplies_for(weights, device, tied=self._tied)

    def stats(self) -> RunStats:
        uses: dict[str, list[int]] = {}
        for block in list(self._blocks):
            if block.is_routed:
                uses.setdefault(block.name.rpartition(".")[0], []).append(block.num_uses)
        experts = {name: tuple(counts) for name, counts in uses.items()}
        return replace(self.log.stats(), experts=experts, whole_experts=self._whole_experts)

    def begin_forward(self) -> None:
        """Install all resident blocks for a forward of the model in the calling thread, past their hooks.

        What a hook does around each block costs a hundred microseconds: its objects are in no cache of the processor
        any more when the block before has computed. All in a row cost a tenth.

        Not before one forward has ended well: a module that asks for the weight of another one, which is absent in the
        first forward, is then refused in each. And not a block that another forward uses without holding it: that one
        would go past the hook as well, and lose the weights when this one ends.
        """
        held: list[StreamedBlock] = []
        self._forwards().append(_Forward(held, len(self._entered())))
        try:
            with self._lock:
                others = list(self._under_way.values())
                self._under_way[id(held)] = held
                kept = self._kept if self._has_succeeded and self._limits is not _NOTHING else ()
                for block in kept:
                    if any(block not in other for other in others):
                        continue
                    if block.residency is not Residency.RESIDENT or not (block.num_users or block.is_current()):
                        continue
                    block.num_users += 1
                    held.append(block)
                    try:
                        self._acquire(block)
                    except Exception:  # the forward of the block raises it
                        self._leave_last(held)
                    else:
                        block.bypass()
            self.log.forward_began(held_bytes=self._held_bytes)
        except BaseException:  # Ctrl-C: a block left half installed would stay so
            self._release(self._forwards().pop().held)
            raise

    def end_forward(self) -> None:
        """End a forward of the model in the calling thread, or one that raised."""
        forwards = self._forwards()
        try:
            self._release(forwards[-1].held)
        except BaseException:  # Ctrl-C
            self._release(forwards[-1].held)
            raise
        finally:
            forwards.pop()
            self.log.forward_ended()

    def leave_inner_blocks(self) -> None:
        """Leave what the forward of the model in this thread has entered, and Ctrl-C has kept it from leaving."""
        self._leave_since(self._forwards()[-1].num_entered)

    def under_way(self) -> tuple[int, int]:
        """Return how many forwards of the model are under way in the calling thread, and how many blocks it is in."""
        return len(self._forwards()), len(self._entered())

    def end_since(self, num_forwards: int, num_entered: int) -> None:
        """End what an interrupted `end_forward` or `leave` has not: until no more is under way than these."""
        while len(self._forwards()) > num_forwards:
            self.end_forward()
        self._leave_since(num_entered)

    def _forwards(self) -> list[_Forward]:
        """Return the forwards of the model in the calling thread, the innermost last."""
        forwards: list[_Forward] = self._here.__dict__.setdefault("forwards", [])
        return forwards

    def _release(self, held: list[StreamedBlock]) -> None:
        with self._lock:
            self._under_way.pop(id(held), None)
            while held:
                try:
                    held[-1].depart()
                finally:
                    self._leave_last(held)

    def forward_succeeded(self) -> None:
        self._has_succeeded = True

    def enter(self, block: StreamedBlock) -> None:
        """Install the weights of `block` for a forward of the calling thread. Waits until they are resident."""
        began = time.perf_counter()
        entered = self._entered()
        num_before = len(entered)
        try:
            with self._lock:
                self._choose_limits()
                if not block.num_users and not block.is_current():
                    self._evict_and_wait(block)
                    block.renew()
                block.num_users += 1
                entered.append(block)
                self._prefetched.pop(block, None)
                if not block.is_routed:
                    self._order.entered(block)
                self._prefetch()
                is_there = self._acquire(block)
            while not is_there:
                self._fetch(block)
                with self._lock:
                    is_there = self._acquire(block)
            self.log.entered(block.name, began, held_bytes=self._held_bytes)
        except BaseException:
            self._leave_since(num_before)
            raise

    def leave(self, block: StreamedBlock) -> None:
        """End a forward of the calling thread. The last one evicts the weights, unless they are to stay resident."""
        with self._lock:
            try:
                block.depart()
            finally:
                self._leave_entered(block)
        self.log.left(block.name)

    def _entered(self) -> list[StreamedBlock]:
        """Return the blocks that the calling thread has entered and not left, those of this forward last."""
        entered: list[StreamedBlock] = self._here.__dict__.setdefault("entered", [])
        return entered

    def _leave_since(self, num_before: int) -> None:
        """Leave what the calling thread has entered since it had entered `num_before` blocks."""
        entered = self._entered()
        with self._lock:
            while len(entered) > num_before:
                self._leave_entered(entered[-1])

    def _leave_entered(self, block: StreamedBlock) -> None:
        entered = self._entered()
        if block in entered:
            place = entered.index(block)
            entered[place], entered[-1] = entered[-1], entered[place]
            self._leave_last(entered)
        else:  # another thread has begun the generator that this one ends
            self._leave_last([block])

    def _leave_last(self, used: list[StreamedBlock]) -> None:
        """Remove a user of the last of `used`, also one for whom loading failed, and take it from the list."""
        block = used[-1]
        block.num_users -= 1
        used.pop()  # at once: Ctrl-C comes after calls
        self._settle(block)

    def expect(self, now: Sequence[StreamedBlock], later: Sequence[StreamedBlock] = ()) -> None:
        """Request routed blocks: `now` runs in this order, `later` has those of which the hot ones are worth keeping.

        The latter take memory of those that stay, and are loaded after the former.
        """
        with self._lock:
            self._choose_limits()
            for block in now:
                if block.residency is Residency.ABSENT and not block.has_failed:
                    if not self._fits_window(block, now) or not self._request(block):
                        break
                    self._prefetched[block] = None
            hot = [block for block in later if block in self._hot] if self._hot else []
            for block in hot:
                is_wanted = block.residency is Residency.ABSENT and not block.has_failed
                if is_wanted and not (self._admits(block) and self._request(block)):
                    break

    def begin_in_fork(self) -> None:
        """Start over in a forked process, where no other thread would ever release its locks."""
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._prefetch_thread = PrefetchThread(self, Streamer._fetch_ahead)
        self._under_way = {id(each.held): each.held for each in self._forwards()}
        self.log.begin_in_fork()
        for block in self._blocks:
            if block.residency in (Residency.REQUESTED, Residency.LOADING):
                block.residency = Residency.REQUESTED
                self._evict(block)

    def load_resident_experts(self) -> None:
        for block in [block for block in self._blocks if block.is_routed and block.is_kept]:
            with self._lock:
                self._choose_limits()
                try:
                    self._reserve(block)
                except BaseException:
                    self._evict(block)
                    raise
            self._fetch(block)

    def forward_aborted(self) -> None:
        with self._lock:
            self._order.forward_aborted()

    def _choose_limits(self) -> None:
        """Choose the limits, and the blocks that stay, when the first block runs."""
        if self._limits is not _NOTHING:
            return
        steady = [block for block in self._blocks if not block.is_routed]
        self._order = RunOrder(steady)
        self._limits = limits_for(list(self._blocks), self._options)
        self._cached_experts.capacity = self._limits.expert_bytes
        routed = (block for block in self._blocks if block.is_routed and not block.is_kept)
        counts = {block: self._recorded.get(block.name, 0) for block in routed}
        self._hot = hottest(counts, {block: block.num_bytes for block in counts}, self._limits.expert_bytes)
        kept = set(chosen_evenly(steady, self._limits.resident_bytes))
        for block in steady:
            block.is_kept = block in kept
        self._kept = tuple(block for block in steady if block.is_kept and block.bypassable is not None)
        self._num_absent = sum(block.residency is Residency.ABSENT for block in steady)

    def _evict_and_wait(self, block: StreamedBlock) -> None:
        """Evict `block`, if it is loading after that has ended."""
        block.uninstall()
        while not self._evict(block):
            self._arrived.wait()

    def _prefetch(self) -> None:
        """Request the blocks that are expected next, as far as the prefetch window goes."""
        expected = self._expected()
        for block in expected:
            if block.residency is Residency.ABSENT and not block.has_failed:
                if not self._fits_window(block, expected) or not self._request(block):
                    return
                if not block.is_kept:
                    self._prefetched[block] = None

    def _fits_window(self, block: StreamedBlock, expected: Container[StreamedBlock]) -> bool:
        """Return whether `block` fits into the prefetch window, after evicting blocks that are no longer expected."""
        limit = self._limits.expert_prefetch_bytes if block.is_routed else self._limits.prefetch_bytes
        prefetched = [idle for idle in self._prefetched if idle.is_routed == block.is_routed]
        excess = _num_bytes(prefetched) + block.num_bytes - limit
        for stale in [idle for idle in prefetched if idle not in expected]:
            if excess > 0 and self._evict(stale):
                excess -= stale.num_bytes
        return excess <= 0

    def _request(self, block: StreamedBlock) -> bool:
        """Have `block` loaded in the background. If that fails, the forward that needs it loads it, and raises."""
        try:
            self._reserve(block)
            self._prefetch_thread.put(block)
        except Exception:  # no memory, or no thread
            block.has_failed = True
            self._evict(block)
        except BaseException:  # Ctrl-C: whoever needs the block would wait for a thread that knows nothing of it
            self._evict(block)
            raise
        return not block.has_failed

    def _reserve(self, block: StreamedBlock) -> None:
        num_bytes = (
            block.num_bytes
        )  # asked before: Ctrl-C comes at calls, and may not find one counted and not the other
        block.residency = Residency.REQUESTED
        self._held_bytes += num_bytes
        self._num_absent -= not block.is_routed
        block.reserve()

    def _expected(self) -> list[StreamedBlock]:
        """Return the absent blocks that are expected next in this thread, as many as fit into the window."""
        num_bytes = self._limits.prefetch_bytes
        expected: dict[StreamedBlock, None] = {}
        if not num_bytes or not self._num_absent:
            return []
        for block in islice(self._order.ahead(), len(self._blocks)):
            if block in expected or block.num_users or (block.is_kept and block.residency is Residency.RESIDENT):
                continue
            num_bytes -= block.num_bytes
            if num_bytes < 0:
                break
            expected[block] = None
        return list(expected)

    def _acquire(self, block: StreamedBlock) -> bool:
        """Install the weights once they are resident; return `False` if the calling thread has to load them."""
        while block.residency is not Residency.RESIDENT:
            if block.residency is Residency.ABSENT:
                try:
                    self._reserve(block)
                except NotEnoughMemoryError:
                    self._evict(block)
                    if not self._prefetched:
                        raise
                    self._evict_prefetched()
                    continue
                return False
            if block.residency is Residency.REQUESTED and self._prefetch_thread.cancel(block):
                return False
            self._arrived.wait()
        if block.is_installed:
            block.arrive()
        else:
            block.install()
        return True

    def _evict_prefetched(self) -> None:
        """Evict prefetched blocks; if some are loading, wait for the next."""
        for idle in list(self._prefetched):
            self._evict(idle)
        if self._prefetched:
            self._arrived.wait()

    def _fetch_ahead(self, block: StreamedBlock) -> None:
        try:
            self._fetch(block)
        except BaseException:
            block.has_failed = True

    def _fetch(self, block: StreamedBlock) -> None:
        """Load a requested block, unless another thread does. Called without the lock, in any thread."""
        is_mine = has_come = False
        try:
            with self._lock:
                if block.residency is Residency.REQUESTED:
                    block.residency, is_mine = Residency.LOADING, True
            if is_mine:
                with torch.inference_mode(mode=False), self.log.fetching(block.name, block.num_bytes):
                    block.fetch()
                has_come = True
        finally:
            if is_mine:
                with self._lock:
                    block.residency = Residency.RESIDENT
                    block.has_failed = not has_come
                    self._arrived.notify_all()
                    if not has_come:
                        self._evict(block)

    def _settle(self, block: StreamedBlock) -> None:
        try:
            self._settle_once(block)
        except BaseException:  # Ctrl-C: what is left undone would stay so
            self._settle_once(block)
            raise

    def _settle_once(self, block: StreamedBlock) -> None:
        """Evict a block that has lost its last user, or have it stay. Doing it twice counts a use more, and no harm."""
        if block.residency is Residency.REQUESTED and not self._prefetch_thread.has(block):
            self._evict(block)  # the thread that was to load it has given up
            self._arrived.notify_all()
        if block.num_users:
            return
        block.uninstall()
        if block.residency is Residency.ABSENT:
            return
        if block.residency is Residency.RESIDENT:
            block.note_use()
        if block.is_kept:
            return
        if not (self._keeps_expert(block) if block.is_routed else self._keeps_prefetched(block)):
            self._evict(block)

    def _keeps_prefetched(self, block: StreamedBlock) -> bool:
        """Return whether a block stays in the prefetch window: it is loading, or expected again at once."""
        expected = self._expected()
        stays = block.residency is not Residency.RESIDENT or (block in expected and self._fits_window(block, expected))
        if stays:
            self._prefetched[block] = None
        return stays

    def _keeps_expert(self, block: StreamedBlock) -> bool:
        """Return whether a routed block stays: it is loading, or used more than others, which then leave."""
        if block.residency is not Residency.RESIDENT:
            self._prefetched[block] = None
            return True
        self._cached_experts.note_use(block)
        return self._admits(block)

    def _admits(self, block: StreamedBlock) -> bool:
        """Return whether a routed block is to stay, after evicting those that leave for it."""
        leaving = self._cached_experts.admit(
            block, block.num_bytes, lambda other: bool(other.num_users) or other.residency is Residency.LOADING
        )
        for cold in leaving or ():
            self._evict(cold)
        return leaving is not None

    def _evict(self, block: StreamedBlock) -> bool:
        """Evict the weights of `block`; return `False` if they are loading."""
        if block.residency is Residency.LOADING:
            return False
        self._prefetch_thread.cancel(block)
        self._prefetched.pop(block, None)
        self._cached_experts.discard(block)
        if block.residency is not Residency.ABSENT:
            num_bytes = block.num_bytes
            block.residency = Residency.ABSENT
            self._held_bytes -= num_bytes
            self._num_absent += not block.is_routed
        block.drop(forget=block in self._limits.uncached)
        return True


def _num_bytes(blocks: Iterable[StreamedBlock]) -> int:
    return sum(block.num_bytes for block in blocks)


def _begin_in_fork() -> None:
    for streamer in list(_living):
        streamer.begin_in_fork()


os.register_at_fork(after_in_child=_begin_in_fork)
