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
"""How long a process waits for the others to come. They are started together."""

_TRANSFER_TIMEOUT = timedelta(days=30)
"""How long a process waits for others that have come, which may have terabytes to write."""

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
            RankError: another rank is gone.
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
        sendings = [self._start(dist.isend, torch.zeros(1, dtype=torch.uint8), peer) for peer in self._peers]
        self._from_each(confirmations)
        for sending in sendings:
            sending.wait(_JOIN_TIMEOUT)
        self._join_listeners()
        gathered[self.rank] = value
        return [gathered[rank] for rank in range(self.size)]

    def broadcast(self, values: torch.Tensor) -> None:
        """Copy the `values` of rank 0 into those of all, which are on the CPU and alike in form. All ranks call it.

        Rank 0 sends to each rank by itself: a broadcast of gloo that lost a rank on its way leaves others waiting.

        Raises:
            RankError: rank 0 is gone; or, in rank 0 and when all others have the values, another one.
        """
        if self.rank:
            self._transfer(dist.irecv, values, 0)
            return
        with ThreadPoolExecutor(max(self.size - 1, 1), f"{LISTENER_THREAD_PREFIX}sender-") as threads:
            sendings = [threads.submit(self._transfer, dist.isend, values, peer) for peer in self._peers]
        for sending in sendings:
            sending.result()

    def _transfer(self, operation: _Operation, values: torch.Tensor, peer: int) -> None:
        try:
            self._start(operation, values, peer).wait(_TRANSFER_TIMEOUT)
        except RuntimeError as error:
            raise _unreachable(peer, error) from error

    def _listen(self, peer: int, own: bytes, values: _Received, confirmations: _Received) -> None:
        """Receive from `peer` its value, and then the confirmation that it has those of all ranks."""
        try:
            values.put((peer, self._exchange(peer, own)))
            self._start(dist.irecv, torch.zeros(1, dtype=torch.uint8), peer).wait(_TRANSFER_TIMEOUT)
            confirmations.put((peer, b""))
        except (RuntimeError, ValueError) as error:  # the latter: of a group that is closed
            values.put((peer, error))
            confirmations.put((peer, error))

    def _exchange(self, peer: int, own: bytes) -> bytes:
        """Send `own` to `peer`, and return what it sends: first the lengths, then the bytes."""
        num_bytes = torch.empty(1, dtype=torch.int64)
        self._exchange_tensors(peer, torch.tensor([len(own)]), num_bytes)
        received = bytearray(int(num_bytes))
        buffers = (torch.frombuffer(buffer, dtype=torch.uint8) for buffer in (bytearray(own), received))
        self._exchange_tensors(peer, *buffers)
        return bytes(received)

    def _exchange_tensors(self, peer: int, own: torch.Tensor, received: torch.Tensor) -> None:
        sending, receiving = self._start(dist.isend, own, peer), self._start(dist.irecv, received, peer)
        receiving.wait(_TRANSFER_TIMEOUT)
        sending.wait(_TRANSFER_TIMEOUT)

    def _start(self, operation: _Operation, values: torch.Tensor, peer: int, *, tag: int = 0) -> dist.Work:
        work = operation(values, peer, group=self._group, tag=tag)
        assert work is not None, "this rank is in the group"
        return work

    def _from_each(self, received: _Received) -> list[tuple[int, bytes]]:
        """Return a message of each peer.

        Raises:
            RankError: one of them is gone.
        """
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
                nothing = self._start(dist.irecv, torch.zeros(1, dtype=torch.uint8), peer, tag=_NEVER_SENT)
                nothing.wait(timedelta(milliseconds=1))
        self._join_listeners()
        dist.destroy_process_group(self._group)


@contextmanager
def _all_ranks_arrived() -> Iterator[None]:
    """Wait for all ranks before the block, which makes a group: torch would wait minutes for a rank that is gone.

    Raises:
        RankError: one of them has ended, or has not come in time.
    """
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


def _unreachable(peer: int, error: Exception) -> RankError:
    return RankError(peer, f"it can no longer be reached ({first_line(error)})")


@contextmanager
def torch_process_group() -> Iterator[TorchProcessGroup]:
    """Join the ranks of this job for as long as the context lasts.

    Their default process group is the initialised one, which is left as it is, or else the one that the environment
    describes, as torchrun sets it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    Raises:
        RankError: the others did not come, or cannot be reached.
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
