"""Where the processes of a group are, and whether they still live: each says it once, in the store of the group.

A process of this host is looked up in /proc, so its death is noticed at once and nothing else is taken for it: no one
has to give signs of life, and a process may compute for hours. Of another host, the launcher knows: torchrun and mpirun
end a job that lost a process. The process that keeps the store, process 0 if torchrun does not, is missed when the
store is.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from bigload.distributed.launchers import local_place
from bigload.distributed.lost_connections import PROBE_SECONDS, has_left
from bigload.errors import RankError

_LONGEST_NAP_SECONDS = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """A process, and where it runs.

    Attributes:
        rank: Its number in the group.
        node: Its host, which is the same text for all processes there: as the launcher numbers it, else its name.
        kernel: What tells the process numbers of one running system, or container, from those of another.
        pid: Its process number there.
        started: When it was started, in clock ticks since boot; numbers are used again.
    """

    rank: int
    node: str
    kernel: str
    pid: int
    started: int

    @classmethod
    def here(cls, rank: int, size: int) -> Presence:
        """Return that of this process."""
        node = local_place(rank, size).node or f"host={socket.gethostname()}"
        state = _process_state(os.getpid())
        return cls(rank=rank, node=node, kernel=_kernel(), pid=os.getpid(), started=-1 if state is None else state[1])

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; false where this cannot be seen from here."""
        if self.started < 0 or self.kernel != _kernel():
            return False
        state = _process_state(self.pid)
        return state is None or state[0] in "ZX" or state[1] != self.started


@cache
def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {os.getpid()}"  # like no other


def _process_state(pid: int) -> tuple[str, int] | None:
    """Return the state and the starting time of a process (proc_pid_stat(5), fields 3 and 22), `None` if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


class RollCall:
    """The processes of the default process group; this one says where it is.

    The store is asked for at every use and not kept: it lives as long as its group, and holds a port.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.num_turns: dict[str, int] = {}
        self._known: dict[int, Presence] = {}
        with store_errors():
            store().set(_said_by(self.rank), self.said)

    @cached_property
    def here(self) -> Presence:
        return Presence.here(self.rank, self.size)

    @property
    def said(self) -> str:
        """Where this process is, as others read it."""
        return json.dumps(asdict(self.here))

    def of(self, rank: int) -> Presence | None:
        """Return where a process is, `None` if it has not said so yet.

        Raises:
            RankError: the store is gone.
        """
        if rank not in self._known:
            with store_errors():
                if store().check([_said_by(rank)]):
                    self._known[rank] = Presence(**json.loads(store().get(_said_by(rank))))
        return self._known.get(rank)

    def has_ended(self, rank: int, *, may_probe: bool) -> bool:
        """Return whether a process is known to have ended, by its connection if it has not said where it is."""
        presence = self.of(rank)
        return (may_probe and has_left(rank)) if presence is None else presence.has_ended()

    def num_before(self) -> int:
        """Return how many processes of this host have a lower rank; waits until all such have said where they are.

        Raises:
            RankError: one does not.
        """
        return sum(each.node == self.here.node for each in self._all(range(self.rank), None))

    def neighbours(self, limit_seconds: float | None) -> list[int]:
        """Return the ranks of the other processes of this host; waits until all processes have said where they are.

        Raises:
            RankError: one does not.
        """
        others = (rank for rank in range(self.size) if rank != self.rank)
        return [each.rank for each in self._all(others, limit_seconds) if each.node == self.here.node]

    def _all(self, ranks: Iterable[int], limit_seconds: float | None) -> list[Presence]:
        wanted = list(ranks)
        unknown = {rank: _said_by(rank) for rank in wanted if rank not in self._known}
        self.wait_for(unknown, "has not said which host it is on", limit_seconds=limit_seconds)
        return [each for rank in wanted if (each := self.of(rank)) is not None]

    def wait_for(self, keys: dict[int, str], reason: str, *, limit_seconds: float | None = None) -> None:
        """Wait until the store has all `keys`, each of which a process sets.

        Args:
            keys: By the rank of the process that sets it.
            reason: What to say of a process that has not done so in time.
            limit_seconds: How long to wait; the timeout of the process group if it is not given.

        Raises:
            RankError: a process has ended without it, has not set it in time, or the store is gone.
        """
        limit = patience_seconds() if limit_seconds is None else limit_seconds
        missing = dict(keys)
        probed = 0.0
        for waited in naps():
            missing = {rank: key for rank, key in missing.items() if not _has(key)}
            if not missing:
                return
            is_time_to_probe = waited > probed + PROBE_SECONDS
            for rank, key in missing.items():
                if self.has_ended(rank, may_probe=is_time_to_probe) and not _has(key):
                    raise RankError(rank, f"it has ended, and {reason}")
            probed = waited if is_time_to_probe else probed
            if waited > limit:
                raise late(next(iter(missing)), reason, waited)


_calls: WeakKeyDictionary[dist.ProcessGroup, RollCall] = WeakKeyDictionary()


def roll_call() -> RollCall:
    """Return that of the default process group, which is initialised.

    Raises:
        RankError: its store is gone.
    """
    group = dist.group.WORLD
    assert group is not None
    if group not in _calls:
        _calls[group] = RollCall()
    return _calls[group]


def store() -> Store:
    """Return where the processes of the default group leave word for each other."""
    return PrefixStore("bigload", _get_default_store())


@contextmanager
def store_errors() -> Iterator[None]:
    """Have what the store raises told as an error of bigload.

    Raises:
        RankError: the store cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise RankError(
            None,
            f"the store of the process group can no longer be reached ({first_line:.200})",
            hint="the process that keeps it has ended, mostly process 0; see what it said",
        ) from error


def patience_seconds() -> float:
    """Return how long a process waits for others to come: the timeout of the process group."""
    return float(store().timeout.total_seconds())  # type: ignore[attr-defined]  # its stubs lack it


def naps() -> Iterator[float]:
    """Yield for how many seconds there was a wait so far, and wait a little longer each time; signals are served."""
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        yield waited
        time.sleep(min(max(waited / 8, 0.0005), _LONGEST_NAP_SECONDS))


def late(rank: int | None, reason: str, waited_seconds: float) -> RankError:
    """Return the error that says for how long a process was waited for."""
    hint = "all processes have to come here; give init_process_group a longer timeout if one takes that long"
    return RankError(rank, f"it {reason} in {waited_seconds:.0f} s", hint=hint)


def _has(key: str) -> bool:
    with store_errors():
        return bool(store().check([key]))


def _said_by(rank: int) -> str:
    return f"here/{rank}"
