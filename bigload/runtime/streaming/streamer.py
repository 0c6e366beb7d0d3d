"""Decides when the weights of blocks come and go, and has them fetched while others compute.

One lock is around all decisions; only the fetching itself is outside. Memory is bounded by bytes: blocks that run,
blocks that stay, and a window for those that come next.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import islice

import torch

from bigload.errors import NotEnoughMemoryError
from bigload.runtime.streaming.options import StreamOptions
from bigload.runtime.streaming.prefetch_thread import Fetcher
from bigload.runtime.streaming.residents import Room, chosen_evenly, room_for
from bigload.runtime.streaming.run_log import RunLog
from bigload.runtime.streaming.run_order import RunOrder
from bigload.runtime.streaming.streamed_block import Stay, StreamedBlock
from bigload.runtime.streaming.supply import Supply
from bigload.runtime.streaming.supply_choice import Carriers, tied_among
from bigload.runtime.streaming.weights import Weight

_living: weakref.WeakSet[Streamer] = weakref.WeakSet()


class Streamer:
    """Brings the weights of the blocks of one model. May be used from several threads.

    Args:
        options: How much memory that takes.
    """

    def __init__(self, options: StreamOptions) -> None:
        self.log = RunLog()
        self._options = options
        self._blocks: list[StreamedBlock] = []
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._fetcher = Fetcher(weakref.WeakMethod(self._fetch_ahead))
        self._carriers = Carriers()
        self._tied: frozenset[int] | None = None
        self._room: Room | None = None
        self._order: RunOrder[StreamedBlock] = RunOrder([])
        self._held_bytes = 0
        self._num_away = 0  # of the blocks that are not routed
        self._idle: dict[StreamedBlock, None] = {}  # there or on their way, not kept, not in use; oldest first
        self._hot: dict[StreamedBlock, None] = {}  # routed ones that stay for the time being
        _living.add(self)

    def __getstate__(self) -> dict[str, StreamOptions]:
        return {"options": self._options}

    def __setstate__(self, state: dict[str, StreamOptions]) -> None:
        """Become a streamer for a copy of the model, whose blocks add themselves."""
        self.__init__(**state)  # type: ignore[misc]

    def add(self, block: StreamedBlock) -> None:
        """Have `block` streamed. The order of adding is the first guess at the order in which blocks run."""
        with self._lock:
            self._blocks.append(block)
            self._room = self._tied = None

    def remove(self, block: StreamedBlock) -> None:
        """Let go of `block` and its weights."""
        with self._lock:
            if block in self._blocks:
                self._blocks.remove(block)
                self._room = None
                self._recall(block)
                if not self._blocks:
                    self._carriers.close()

    def close(self) -> None:
        """Let go of everything that waits for blocks to run."""
        with self._lock:
            for block in list(self._blocks):
                self.remove(block)

    def supplies_for(self, weights: Sequence[Weight], device: torch.device) -> tuple[Supply, ...]:
        """Return what brings `weights` to `device`."""
        if self._tied is None:
            self._tied = tied_among([block.weights() for block in self._blocks])
        return self._carriers.supplies_for(weights, device, tied=self._tied)

    def enter(self, block: StreamedBlock) -> None:
        """Have the weights of `block` in its modules for a forward of the calling thread; waits until they are there.

        Raises:
            ReadError: they could not be read. The block is as it was before.
            NotEnoughMemoryError: there is no memory for them.
            ChangedShapeError: values have other shapes than the model.
        """
        began = time.perf_counter()
        with self._lock:
            room = self._settled()
            if not block.num_users and not block.is_current():
                self._recall(block)
                block.renew()
            block.num_users += 1
        try:
            with self._lock:
                self._idle.pop(block, None)
                if not block.is_routed:
                    self._order.entered(block)
                self._look_ahead(room)
                is_there = self._take(block)
            while not is_there:
                self._fetch(block)
                with self._lock:
                    is_there = self._take(block)
            self.log.entered(block.name, began, held_bytes=self._held_bytes)
        except BaseException:
            with self._lock:
                self._leave(block)
            raise

    def leave(self, block: StreamedBlock) -> None:
        """Note that a forward of the calling thread is over; with the last one, the weights go."""
        with self._lock:
            try:
                block.depart()
            finally:
                self._leave(block)
        self.log.left(block.name)

    def begin_in_fork(self) -> None:
        """Be of use in a process that was forked off: without the threads, whose locks would never be given back."""
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._fetcher = Fetcher(weakref.WeakMethod(self._fetch_ahead))
        self.log.begin_in_fork()
        for block in self._blocks:
            if block.stay in (Stay.ASKED, Stay.COMING):
                block.stay = Stay.ASKED
                self._send_away(block)

    def broken_off(self) -> None:
        """Note that the pass of the calling thread ended in an error."""
        with self._lock:
            self._order.broken_off()

    def _settled(self) -> Room:
        """Return the room that there is, chosen when the first block runs."""
        if self._room is None:
            steady = [block for block in self._blocks if not block.is_routed]
            self._order = RunOrder(steady)
            self._room = room_for(self._blocks, self._options)
            kept = set(chosen_evenly(steady, self._room.resident_bytes))
            for block in steady:
                block.is_kept = block in kept
            self._num_away = sum(block.stay is Stay.AWAY for block in steady)
        return self._room

    def _recall(self, block: StreamedBlock) -> None:
        """Send the weights of `block` away, also when they are just coming."""
        block.hide()
        while not self._send_away(block):
            self._arrived.wait()

    def _look_ahead(self, room: Room) -> None:
        """Ask for what is expected next, as far as the window goes."""
        expected = self._expected(room)
        for block in expected:
            if block.stay is Stay.AWAY and not block.is_troubled:
                if not self._makes_room(block, room, expected) or not self._ask(block):
                    return
                if not block.is_kept:
                    self._idle[block] = None

    def _makes_room(self, block: StreamedBlock, room: Room, expected: Sequence[StreamedBlock]) -> bool:
        """Return whether `block` fits into the window, from which goes what is not expected any more."""
        excess = self._idle_bytes() + block.num_bytes - room.prefetch_bytes
        for stale in [idle for idle in self._idle if idle not in expected]:
            if excess > 0 and self._send_away(stale):
                excess -= stale.num_bytes
        return excess <= 0

    def _ask(self, block: StreamedBlock) -> bool:
        """Have `block` fetched in the background. If that cannot be, who needs it fetches it, and is told why not."""
        try:
            self._take_memory(block)
            self._fetcher.put(block)
        except Exception:  # no memory, or no thread
            block.is_troubled = True
            self._send_away(block)
        return not block.is_troubled

    def _take_memory(self, block: StreamedBlock) -> None:
        block.stay = Stay.ASKED
        self._held_bytes += block.num_bytes
        self._num_away -= not block.is_routed
        block.reserve()

    def _expected(self, room: Room) -> list[StreamedBlock]:
        """Return the blocks that are expected next in this thread, as many of those that have to come as fit."""
        num_bytes = room.prefetch_bytes
        expected: dict[StreamedBlock, None] = {}
        if not num_bytes or not self._num_away:
            return []
        for block in islice(self._order.ahead(), len(self._blocks)):
            if block in expected or block.num_users or (block.is_kept and block.stay is Stay.HERE):
                continue
            num_bytes -= block.num_bytes
            if num_bytes < 0:
                break
            expected[block] = None
        return list(expected)

    def _take(self, block: StreamedBlock) -> bool:
        """Show the weights, when they are there; return `False` if the calling thread has to fetch them before."""
        while block.stay is not Stay.HERE:
            if block.stay is Stay.AWAY:
                try:
                    self._take_memory(block)
                except NotEnoughMemoryError:
                    self._send_away(block)
                    if not self._idle:
                        raise
                    self._make_room()
                    continue
                return False
            if block.stay is Stay.ASKED and self._fetcher.take_back(block):
                return False
            self._arrived.wait()
        if block.is_shown:
            block.arrive()
        else:
            block.show()
        return True

    def _make_room(self) -> None:
        """Let go of what is there for later, or is just coming."""
        for idle in list(self._idle):
            self._send_away(idle)
        if self._idle:
            self._arrived.wait()

    def _fetch_ahead(self, block: StreamedBlock) -> None:
        try:
            self._fetch(block)
        except BaseException:
            block.is_troubled = True

    def _fetch(self, block: StreamedBlock) -> None:
        """Fetch what was asked for, unless somebody else does. Called without the lock, in any thread."""
        is_mine = has_come = False
        try:
            with self._lock:
                if block.stay is Stay.ASKED:
                    block.stay, is_mine = Stay.COMING, True
            if is_mine:
                with torch.inference_mode(mode=False), self.log.fetching(block.name, block.num_bytes):
                    block.fetch()
                has_come = True
        finally:
            if is_mine:
                with self._lock:
                    block.stay = Stay.HERE
                    block.is_troubled = not has_come
                    self._arrived.notify_all()
                    if not has_come:
                        self._send_away(block)

    def _leave(self, block: StreamedBlock) -> None:
        """Have one user less, also one for whom the weights have not come."""
        block.num_users -= 1
        if block.stay is Stay.ASKED and not self._fetcher.has(block):  # given up by who was to fetch them
            self._send_away(block)
            self._arrived.notify_all()
        if block.num_users:
            return
        block.hide()
        room = self._room
        if block.stay is Stay.AWAY or block.is_kept:
            return
        if block.stay is Stay.HERE:
            block.num_uses += 1
        if room is None or not (self._stays_hot(block, room) if block.is_routed else self._stays_ready(block, room)):
            self._send_away(block)

    def _stays_ready(self, block: StreamedBlock, room: Room) -> bool:
        """Return whether a block stays, in the window: it is expected again at once, or just comes."""
        expected = self._expected(room)
        stays = block.stay is not Stay.HERE or (block in expected and self._makes_room(block, room, expected))
        if stays:
            self._idle[block] = None
        return stays

    def _stays_hot(self, block: StreamedBlock, room: Room) -> bool:
        """Return whether a routed block stays, in the place of others that are used less."""
        self._hot.pop(block, None)
        excess = sum(each.num_bytes for each in self._hot) + block.num_bytes - room.hot_bytes
        leaving = []
        latest_first = [block, *reversed(self._hot)]  # of equals the last one goes: they come round in a cycle
        for cold in sorted(latest_first, key=lambda each: each.num_uses):
            if excess > 0 and not cold.num_users:
                excess -= cold.num_bytes
                leaving.append(cold)
        if block in leaving:  # without it the others fit, as they did before
            return False
        for cold in leaving:
            self._send_away(cold)
        self._hot[block] = None
        return True

    def _send_away(self, block: StreamedBlock) -> bool:
        """Let go of the weights of `block`; return whether that is done. If not, they are just coming."""
        if block.stay is Stay.COMING:
            return False
        self._fetcher.take_back(block)
        self._idle.pop(block, None)
        self._hot.pop(block, None)
        if block.stay is not Stay.AWAY:
            block.stay = Stay.AWAY
            self._held_bytes -= block.num_bytes
            self._num_away += not block.is_routed
        room = self._room
        block.drop(forget=room is not None and block in room.forgotten)
        return True

    def _idle_bytes(self) -> int:
        return sum(block.num_bytes for block in self._idle)


def _begin_in_fork() -> None:
    for streamer in list(_living):
        streamer.begin_in_fork()


os.register_at_fork(after_in_child=_begin_in_fork)
