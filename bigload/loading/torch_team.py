"""A team of the ranks of torch.distributed: those that torchrun started, or a process group that is there already."""

from __future__ import annotations

import ctypes
import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist

from bigload.errors import RankError

T = TypeVar("T")

_MEETING = timedelta(minutes=10)
"""How long a process waits for the others to come. They are started together."""

_PATIENCE = timedelta(days=30)
"""How long a process waits for others that have come, which may have terabytes to write."""


class TorchTeam:
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
        self._group = dist.new_group(backend="gloo", timeout=_MEETING)
        self._is_broken = False

    def share(self, value: T) -> list[T]:
        """Return what all ranks gave, in their order. A signal ends the wait, after which the team is of no more use.

        Raises:
            RankError: one of them is gone.
        """
        said = pickle.dumps(value)
        heard: SimpleQueue[tuple[int, bytes | RuntimeError]] = SimpleQueue()
        peers = [rank for rank in range(self.size) if rank != self.rank]
        values = {self.rank: value}
        self._is_broken = True  # until all is said and heard: threads wait in gloo, which nothing can interrupt
        for peer in peers:
            threading.Thread(target=self._exchange, args=(peer, said, heard), daemon=True).start()
        for _ in peers:
            peer, answer = heard.get()
            if isinstance(answer, RuntimeError):
                reason = f"it can no longer be reached ({str(answer).splitlines()[0]:.200})"
                raise RankError(peer, reason) from answer
            values[peer] = pickle.loads(answer)
        self._is_broken = False
        return [values[rank] for rank in range(self.size)]

    def _exchange(self, peer: int, said: bytes, heard: SimpleQueue[tuple[int, bytes | RuntimeError]]) -> None:
        try:
            heard.put((peer, self._swap(peer, said)))
        except RuntimeError as error:
            heard.put((peer, error))

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

    def close(self) -> None:
        """Give the connections back."""
        if self._is_broken:
            # Destroying a group waits for the threads that wait in it, also at the end of the interpreter. This way the
            # process can end, and its end closes the connections.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        dist.destroy_process_group(self._group)


@contextmanager
def torch_team() -> Iterator[TorchTeam]:
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
        team = TorchTeam()
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
        hint = "call it in all processes of the group, or with team=bigload.loading.team.Alone() in one"
        num_processes = str(dist.get_world_size())
    first_line = next(iter(str(error).splitlines()), type(error).__name__)
    return RankError(None, f"cannot join the {num_processes} of this job: {first_line:.300}", hint=hint)
