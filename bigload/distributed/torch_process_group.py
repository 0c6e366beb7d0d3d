"""A team of the ranks of torch.distributed: those that torchrun started, or a process group that is there already."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from bigload.distributed.lost_connections import PROBE_SECONDS, has_left
from bigload.distributed.process_group import LISTENER_THREAD_PREFIX, to_json
from bigload.errors import RankError

T = TypeVar("T")

_MEETING = timedelta(minutes=10)
"""How long a process waits for the others to come. They are started together."""

_PATIENCE = timedelta(days=30)
"""How long a process waits for others that have come, which may have terabytes to write."""

_NEVER_SENT = 1
"""A tag that no message has."""


_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


@contextmanager
def _all_present(rank: int, size: int) -> Iterator[None]:
    """Wait until all ranks have come here: making a group, which the block does, waits minutes for a rank that is gone.

    Raises:
        RankError: one of them has ended, or has not come in time.
    """
    group = dist.group.WORLD
    assert group is not None
    number = next(_numbers.setdefault(group, itertools.count()))
    store = PrefixStore(f"bigload-team-{number}", _get_default_store())
    store.set(str(rank), "")
    missing = [each for each in range(size) if each != rank]
    start = probed = time.monotonic()
    while missing := [each for each in missing if not store.check([str(each)])]:
        now = time.monotonic()
        if now - probed > PROBE_SECONDS:
            probed = now
            for each in missing:
                if has_left(each) and not store.check([str(each)]):
                    raise RankError(each, "it has ended, and has not come to what all processes do together")
        if now - start > _MEETING.total_seconds():
            raise RankError(
                missing[0], f"it has not come in {now - start:.0f} s", hint="all processes have to call this"
            )
        time.sleep(min((now - start) / 8 + 0.0005, 0.25))
    yield
    store.delete_key(str(rank))  # all have read it: they have made the group


class TorchProcessGroup:
    """All ranks of the default process group, which is initialised. To be made by all of them.

    They talk through gloo, whatever the default group uses: what they say lies in memory of the host. Each pair of them
    has a connection, and who waits listens to all: a process that dies closes its own, which is noticed at once.

    A host that loses power, or its network, closes nothing. There it is torchrun that ends the job: its agents hear
    nothing from each other any more, and stop their processes. Without it, the kernel gives a connection up minutes
    after it had something to send, and those who only wait go on waiting: end them, and go on with what is there.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        with _all_present(self.rank, self.size):
            self._group = dist.new_group(backend="gloo", timeout=_MEETING)
        self._listeners: dict[int, threading.Thread] = {}

    def all_gather(self, value: T) -> list[T]:
        """Return what all ranks gave, in their order. A signal ends the wait, after which the team is of no more use.

        Raises:
            TypeError: JSON does not give `value` back.
            RankError: one of them is gone.
        """
        said = to_json(value)
        news: SimpleQueue[tuple[int, bytes | Exception]] = SimpleQueue()
        peers = [rank for rank in range(self.size) if rank != self.rank]
        for peer in peers:
            arguments = (peer, said, news)
            listener = threading.Thread(
                target=self._listen, args=arguments, name=f"{LISTENER_THREAD_PREFIX}{peer}", daemon=True
            )
            listener.start()
            self._listeners[peer] = listener
        heard = {peer: _from_json(peer, answer) for peer, answer in _from_each(peers, news)}
        # Nobody goes on before all have heard all. So whoever waits is listened to until then, and missed if it dies.
        done = [dist.isend(torch.zeros(1, dtype=torch.uint8), peer, group=self._group) for peer in peers]
        _from_each(peers, news)
        for sending in done:
            assert sending is not None
            sending.wait(_MEETING)
        self._join()
        heard[self.rank] = value
        return [heard[rank] for rank in range(self.size)]

    def broadcast(self, values: torch.Tensor) -> None:
        """Make `values`, in memory of the CPU and of one form everywhere, those of rank 0. All ranks call it.

        Rank 0 sends to each by itself: a broadcast that lost one on its way leaves others waiting for it.

        Raises:
            RankError: rank 0 is gone; or, in rank 0 and when all others have the values, another one.
        """
        if self.rank:
            _finish(0, dist.irecv, values, self._group)
            return
        with ThreadPoolExecutor(
            max_workers=max(self.size - 1, 1), thread_name_prefix=f"{LISTENER_THREAD_PREFIX}sender-"
        ) as threads:
            peers = range(1, self.size)
            sendings = [threads.submit(_finish, peer, dist.isend, values, self._group) for peer in peers]
        for sending in sendings:
            sending.result()

    def _listen(self, peer: int, said: bytes, news: SimpleQueue[tuple[int, bytes | Exception]]) -> None:
        """Tell `news` what `peer` says, and then that it has heard all; or that it is gone."""
        try:
            news.put((peer, self._swap(peer, said)))
            done = dist.irecv(torch.zeros(1, dtype=torch.uint8), peer, group=self._group)
            assert done is not None
            done.wait(_PATIENCE)
            news.put((peer, b""))
        except (RuntimeError, ValueError) as error:  # the latter: of a group that is closed
            news.put((peer, error))

    def _swap(self, peer: int, said: bytes) -> bytes:
        """Send `said` to `peer`, and return what it sends."""
        num_bytes = torch.empty(1, dtype=torch.int64)
        self._swap_tensors(peer, torch.tensor([len(said)]), num_bytes)
        answer = bytearray(int(num_bytes))
        self._swap_tensors(
            peer, torch.frombuffer(bytearray(said), dtype=torch.uint8), torch.frombuffer(answer, dtype=torch.uint8)
        )
        return bytes(answer)

    def _swap_tensors(self, peer: int, said: torch.Tensor, heard: torch.Tensor) -> None:
        sending = dist.isend(said, peer, group=self._group)
        receiving = dist.irecv(heard, peer, group=self._group)
        assert sending is not None
        assert receiving is not None
        receiving.wait(_PATIENCE)
        sending.wait(_PATIENCE)

    def _join(self) -> None:
        """Wait for the listeners: one that comes out of gloo when the interpreter has ended would have torch abort."""
        for listener in self._listeners.values():
            listener.join()
        self._listeners.clear()

    def close(self) -> None:
        """Give the connections back. Who waits for an answer, here or in another process, is told that none will come.

        Destroying a group waits for those who wait in it, for days if need be, and torch has no way to call them back.
        But gloo closes all connections of a group when something in it has not come in time: so ask for what nobody
        sends, and wait for a moment.
        """
        for peer in self._listeners:
            with suppress(RuntimeError):
                nothing = dist.irecv(torch.zeros(1, dtype=torch.uint8), peer, group=self._group, tag=_NEVER_SENT)
                assert nothing is not None
                nothing.wait(timedelta(milliseconds=1))
        self._join()
        dist.destroy_process_group(self._group)


def _finish(
    peer: int, swap: Callable[..., dist.Work | None], values: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Send `values` to `peer`, or receive them from it."""
    try:
        work = swap(values, peer, group=group)
        assert work is not None
        work.wait(_PATIENCE)
    except RuntimeError as error:
        raise _gone(peer, error) from error


def _from_json(peer: int, answer: bytes) -> Any:  # noqa: ANN401 - what `to_json` took
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        hint = "all processes of a job need the same version of bigload"
        raise RankError(peer, f"it sent {len(answer)} bytes that are not JSON", hint=hint) from error


def _gone(peer: int, error: Exception) -> RankError:
    return RankError(peer, f"it can no longer be reached ({str(error).splitlines()[0]:.200})")


def _from_each(peers: Sequence[int], news: SimpleQueue[tuple[int, bytes | Exception]]) -> list[tuple[int, bytes]]:
    """Wait for a piece of news from each of `peers`.

    Raises:
        RankError: one of them is gone.
    """
    found = []
    early = []
    missing = set(peers)
    while missing:
        peer, told = news.get()
        if isinstance(told, Exception):
            raise _gone(peer, told) from told
        if peer in missing:
            missing.remove(peer)
            found.append((peer, told))
        else:
            early.append((peer, told))
    for each in early:  # of the next kind
        news.put(each)
    return found


@contextmanager
def torch_process_group() -> Iterator[TorchProcessGroup]:
    """Join the ranks of this job for as long as the context lasts.

    Where a process group is initialised, that one, which is left as it is; else the one that the environment describes,
    as torchrun sets it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        RankError: the others did not come, or cannot be reached.
    """
    is_ours = not dist.is_initialized()
    try:
        if is_ours:
            dist.init_process_group("gloo", timeout=_MEETING)
        team = TorchProcessGroup()
    except RankError:
        if is_ours:
            dist.destroy_process_group()
        raise
    except (RuntimeError, ValueError) as error:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()
        raise _not_met(error, is_ours=is_ours) from error
    try:
        yield team
    finally:
        team.close()
        if is_ours:
            dist.destroy_process_group()


def _not_met(error: Exception, *, is_ours: bool) -> RankError:
    if is_ours:
        hint = (
            "start all with torchrun; GLOO_SOCKET_IFNAME names the network between hosts, and without WORLD_SIZE in "
            "the environment one process works alone"
        )
        num_processes = os.environ.get("WORLD_SIZE", "?")
    else:
        hint = "call it in all processes of the group, or with team=bigload.distributed.process_group.SingleProcess() in one"
        num_processes = str(dist.get_world_size())
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return RankError(None, f"cannot join the {num_processes} of this job: {first_line:.300}", hint=hint)
