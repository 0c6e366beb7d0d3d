"""The process group of torch.distributed's ranks: those that torchrun started, or that have initialised one already."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bigload.distributed.connections import keep_alive
from bigload.distributed.liveness import process_registry, store, store_errors
from bigload.distributed.process_group import first_line, to_json
from bigload.errors import RankError

T = TypeVar("T")

LISTENER_THREAD_PREFIX = "bigload-process-group-"
"""Prefix of the names of threads that wait for other processes. None is left when a group is closed, or has failed."""

_JOIN_TIMEOUT = timedelta(minutes=10)
"""Seconds to wait for the other processes to arrive. They are started together."""

_TRANSFER_TIMEOUT = timedelta(days=30)
"""Seconds to wait for processes that have arrived: they may have terabytes to write."""

_NEVER_SENT = 1
"""A tag that no message has."""

_Operation = Callable[..., dist.Work | None]

_Received = SimpleQueue[tuple[int, bytes | Exception]]
"""A message of each peer, or the error that says that the peer is gone."""


class TorchProcessGroup:
    """All ranks of the default process group, which is initialised. All of them create it.

    They talk through gloo, whatever the default group uses, as messages are in host memory. Each pair of ranks has a
    connection, and a waiting rank listens to all: a dead process closes its own, so its death is noticed at once.

    A host that loses power, or its network, closes nothing: the kernel here does it, after a minute without an answer.

    When a connection closes, gloo ends the operations that have not begun, and forgets a message that is under way: who
    waits for that waits on. So a message is followed by a byte, for which its receiver waits first; and its sender
    waits first for a byte from the receiver.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        with _all_ranks_arrived():
            self._group = dist.new_group(backend="gloo", timeout=_JOIN_TIMEOUT)
        keep_alive()
        self._listeners: dict[int, threading.Thread] = {}

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order. After a signal that ends the wait, the group is unusable.

        Raises:
            TypeError: JSON does not give `value` back.
        """
        own = to_json(value)
        values, confirmations = _Received(), _Received()
        for peer in self._peers:
            listener = threading.Thread(
                target=self._listen,
                args=(peer, own, values, confirmations),
                name=f"{LISTENER_THREAD_PREFIX}{peer}",
                daemon=True,
            )
            listener.start()
            self._listeners[peer] = listener
        gathered = {peer: _from_json(peer, message) for peer, message in self._from_each(values)}
        # No rank goes on before all have all values: so each is listened to until then, and missed if it dies.
        sendings = [self._start(dist.isend, _byte(), peer) for peer in self._peers]
        self._from_each(confirmations)
        for sending in sendings:
            sending.wait(_JOIN_TIMEOUT)
        self._join_listeners()
        gathered[self.rank] = value
        return [gathered[rank] for rank in range(self.size)]

    def broadcast(self, values: torch.Tensor) -> None:
        """Copy the `values` of rank 0 into those of all, which are on the CPU and alike in form. All ranks call it.

        Rank 0 sends to each rank by itself: a broadcast of gloo that lost a rank on its way leaves others waiting.
        """
        if self.rank:
            with _reaching(0):
                self._receive(values, 0)
                self._start(dist.isend, _byte(), 0).wait(_JOIN_TIMEOUT)
            return
        with ThreadPoolExecutor(max(self.size - 1, 1), f"{LISTENER_THREAD_PREFIX}sender-") as threads:
            sendings = [threads.submit(self._send_and_hear, values, peer) for peer in self._peers]
        for sending in sendings:
            sending.result()

    def _send_and_hear(self, values: torch.Tensor, peer: int) -> None:
        with _reaching(peer):
            answer = self._start(dist.irecv, _byte(), peer)
            sendings = self._send(values, peer)
            answer.wait(_TRANSFER_TIMEOUT)
            for sending in sendings:
                sending.wait(_JOIN_TIMEOUT)

    def _listen(self, peer: int, own: bytes, values: _Received, confirmations: _Received) -> None:
        """Receive from `peer` its value, and then the confirmation that it has those of all ranks."""
        try:
            length = torch.empty(1, dtype=torch.int64)
            sendings = self._send(torch.tensor([len(own)]), peer)
            self._receive(length, peer)
            received = bytearray(int(length))
            sendings += self._send(torch.frombuffer(bytearray(own), dtype=torch.uint8), peer)
            self._receive(torch.frombuffer(received, dtype=torch.uint8), peer)
            values.put((peer, bytes(received)))
            self._start(dist.irecv, _byte(), peer).wait(_TRANSFER_TIMEOUT)
            for sending in sendings:
                sending.wait(_JOIN_TIMEOUT)
            confirmations.put((peer, b""))
        except (RuntimeError, ValueError) as error:  # the latter: of a group that is closed
            values.put((peer, error))
            confirmations.put((peer, error))

    def _send(self, values: torch.Tensor, peer: int) -> list[dist.Work]:
        """Start to send; to be waited for when `peer` has answered."""
        return [self._start(dist.isend, values, peer), self._start(dist.isend, _byte(), peer)]

    def _receive(self, values: torch.Tensor, peer: int) -> None:
        message, end = self._start(dist.irecv, values, peer), self._start(dist.irecv, _byte(), peer)
        end.wait(_TRANSFER_TIMEOUT)
        message.wait(_TRANSFER_TIMEOUT)

    def _start(self, operation: _Operation, values: torch.Tensor, peer: int, *, tag: int = 0) -> dist.Work:
        work = operation(values, peer, group=self._group, tag=tag)
        assert work is not None, "this rank is in the group"
        return work

    def _from_each(self, received: _Received) -> list[tuple[int, bytes]]:
        """Return a message of each peer."""
        messages = []
        for _ in self._peers:
            peer, message = received.get()
            if isinstance(message, Exception):
                raise _unreachable(peer, message) from message
            messages.append((peer, message))
        return messages

    def _join_listeners(self) -> None:
        """Join the threads: torch would abort if one returned from gloo after the interpreter has ended."""
        for listener in self._listeners.values():
            listener.join()
        self._listeners.clear()

    def close(self) -> None:
        """Close the connections. Waits of other threads and processes for this one end with an error.

        Destroying a group waits for the threads that wait in it, for days if need be, and torch cannot cancel them. But
        gloo closes all connections of a group when a receive times out: so receive what is never sent, for a moment.
        """
        for peer in self._listeners:
            with suppress(RuntimeError):
                nothing = self._start(dist.irecv, _byte(), peer, tag=_NEVER_SENT)
                nothing.wait(timedelta(milliseconds=1))
        self._join_listeners()
        dist.destroy_process_group(self._group)
        held = [self._group]
        del self._group
        # The last reference ends gloo's threads, which takes 20 to 30 ms: not the caller's.
        threading.Thread(target=held.clear, name="bigload-closed-group").start()


@contextmanager
def _all_ranks_arrived() -> Iterator[None]:
    """Wait for all ranks before the block, which makes a group: torch would wait minutes for a rank that is gone."""
    registry = process_registry()
    number = registry.counts["new_group"] = registry.counts.get("new_group", 0) + 1
    keys = {rank: f"new_group-{number}/{rank}" for rank in range(registry.size)}
    with store_errors():
        store().set(keys[registry.rank], "")
    missing = "has not come to what all processes do together"
    registry.wait_for_keys(keys, missing, limit_seconds=_JOIN_TIMEOUT.total_seconds())
    yield
    with store_errors():
        store().delete_key(keys[registry.rank])  # all have read it: they have made the group


def _from_json(peer: int, message: bytes) -> Any:  # noqa: ANN401 - what `to_json` took
    try:
        return json.loads(message)
    except (ValueError, RecursionError) as error:
        hint = "all processes of a job need the same version of bigload"
        raise RankError(peer, f"it sent {len(message)} bytes that are not JSON", hint=hint) from error


def _byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


@contextmanager
def _reaching(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise _unreachable(peer, error) from error


def _unreachable(peer: int, error: Exception) -> RankError:
    return RankError(peer, f"it can no longer be reached ({first_line(error)})")


@contextmanager
def torch_process_group() -> Iterator[TorchProcessGroup]:
    """Join the ranks of this job for as long as the context lasts.

    Their default process group is the initialised one, which is left as it is, or else the one that the environment
    describes, as torchrun sets it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
    """
    is_ours = not dist.is_initialized()
    try:
        if is_ours:
            dist.init_process_group("gloo", timeout=_JOIN_TIMEOUT)
        group = TorchProcessGroup()
    except (RankError, RuntimeError, ValueError) as error:
        if is_ours and dist.is_initialized():
            dist.destroy_process_group()
        if isinstance(error, RankError):
            raise
        raise _not_joined(error, is_ours=is_ours) from error
    try:
        yield group
    finally:
        group.close()
        if is_ours:
            dist.destroy_process_group()


def _not_joined(error: Exception, *, is_ours: bool) -> RankError:
    if is_ours:
        num_processes = os.environ.get("WORLD_SIZE", "?")
        hint = (
            "start all with torchrun; GLOO_SOCKET_IFNAME names the network between hosts, and without WORLD_SIZE in "
            "the environment one process works alone"
        )
    else:
        num_processes = str(dist.get_world_size())
        single = "bigload.distributed.process_group.SingleProcess()"
        hint = f"call it in all processes of the group, or with team={single} in one"
    return RankError(None, f"cannot join the {num_processes} of this job: {first_line(error)}", hint=hint)
