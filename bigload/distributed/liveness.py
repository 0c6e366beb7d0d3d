"""Liveness of the processes of a group: each publishes its identity once, in the store of the process group.

A process of this host is looked up in /proc, so its death is noticed at once and nothing else is taken for it: no
heartbeats, and a process may compute for hours. One of another host has ended if its connection of gloo is closed:
by its kernel, or by this one after a minute in which that host answered nothing (`connections.py`). With NCCL alone,
its death is the launcher's to notice: torchrun and mpirun end a job that lost a process. If the process dies that
serves the store (process 0, unless torchrun does), reading the store fails.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from bigload.distributed.connections import keep_alive
from bigload.distributed.launchers import host_name
from bigload.distributed.process_group import first_line
from bigload.errors import RankError

_LONGEST_SLEEP_SECONDS = 0.25

_PROBE_SECONDS = 1.0
"""The least time between two probes of connections: each leaves a few bytes in the other process."""

_NEVER_RECEIVED = 0x62696C64
"""A message tag that no process receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process of a group, and where it runs.

    Attributes:
        rank: Its rank in the group.
        node: Its host, the same text for all processes there: as the launcher numbers it, else its name.
        kernel: Boot id and PID namespace, within which process ids are unique.
        pid: Its process id there.
        started: Its start time in clock ticks since boot, as process ids are reused.
    """

    rank: int
    node: str
    kernel: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls, rank: int, size: int) -> ProcessIdentity:
        """Return the identity of this process."""
        state = _process_state(os.getpid())
        return cls(
            rank=rank,
            node=host_name(rank, size),
            kernel=_kernel(),
            pid=os.getpid(),
            started=-1 if state is None else state[1],
        )

    @property
    def is_visible(self) -> bool:
        """Whether this process sees it in its /proc."""
        return self.started >= 0 and self.kernel == _kernel()

    def has_ended(self) -> bool:
        """Return whether the process is known to have ended; false where it is not visible."""
        if not self.is_visible:
            return False
        state = _process_state(self.pid)
        return state is None or state[0] in "ZX" or state[1] != self.started


@cache
def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"unknown {os.getpid()}"  # equal to no other


def _process_state(pid: int) -> tuple[str, int] | None:
    """Return the state and the starting time of a process (proc_pid_stat(5), fields 3 and 22), `None` if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[19])


class ProcessRegistry:
    """Identities of the processes of the default process group; creating it publishes that of this process.

    The store is looked up at every use and not kept: it lives as long as its group, and holds a port.

    Attributes:
        counts: Collective calls so far, by name: the same in all processes, so they number keys in the store.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.counts: dict[str, int] = {}
        self.own = ProcessIdentity.of_this_process(self.rank, self.size)
        self._known: dict[int, ProcessIdentity] = {}
        keep_alive()
        with store_errors():
            store().set(_identity_key(self.rank), json.dumps(asdict(self.own)))

    def identity(self, rank: int) -> ProcessIdentity | None:
        """Return the identity of a process, `None` if it has not published it yet."""
        if rank not in self._known and has_key(_identity_key(rank)):
            with store_errors():
                self._known[rank] = ProcessIdentity(**json.loads(store().get(_identity_key(rank))))
        return self._known.get(rank)

    def has_ended(self, rank: int, *, may_probe: bool) -> bool:
        """Return whether a process is known to have ended, by its connection if it is not visible from here."""
        return is_gone(rank, self.identity(rank), may_probe=may_probe)

    def on_this_host(self, ranks: Iterable[int], limit_seconds: float | None = None) -> list[int]:
        """Return those of `ranks` that are processes of this host; waits until all of `ranks` have published."""
        unknown = {rank: _identity_key(rank) for rank in ranks if rank not in self._known}
        self.wait_for_keys(unknown, "has not said which host it is on", limit_seconds=limit_seconds)
        identities = [self.identity(rank) for rank in ranks]
        return [each.rank for each in identities if each is not None and each.node == self.own.node]

    def wait_for_keys(self, keys: Mapping[int, str], missing: str, *, limit_seconds: float | None = None) -> None:
        """Wait until the store has all `keys`, each set by the process of that rank.

        `missing` is for the error: what a process has not done. The limit is by default the timeout of the process
        group.
        """
        limit = group_timeout_seconds() if limit_seconds is None else limit_seconds
        waiting = dict(keys)
        for poll in polls():
            waiting = {rank: key for rank, key in waiting.items() if not has_key(key)}
            if not waiting:
                return
            for rank, key in waiting.items():
                if self.has_ended(rank, may_probe=poll.may_probe) and not has_key(key):
                    raise RankError(rank, f"it has ended, and {missing}")
            if poll.waited_seconds > limit:
                raise timed_out(next(iter(waiting)), missing, poll.waited_seconds)


def is_gone(rank: int, identity: ProcessIdentity | None, *, may_probe: bool) -> bool:
    """Return whether process `rank`, whose identity may be known, is known to have ended, or cannot be reached."""
    if identity is not None and identity.is_visible:
        return identity.has_ended()
    return may_probe and _is_disconnected(rank)


def _is_disconnected(rank: int) -> bool:
    """Return whether the gloo connection to `rank` is closed; false where the group has no connections of gloo.

    Gloo connects all ranks when the group is made, and the kernel closes the connections of a process that ends.
    """
    if "cpu:gloo" not in dist.get_backend_config().split(","):
        return False
    try:
        dist.isend(torch.zeros(1, dtype=torch.uint8, device="cpu"), rank, tag=_NEVER_RECEIVED)
    except RuntimeError:
        return True
    return False


_registries: WeakKeyDictionary[dist.ProcessGroup, ProcessRegistry] = WeakKeyDictionary()


def process_registry() -> ProcessRegistry:
    """Return the registry of the default process group, which is initialised."""
    group = dist.group.WORLD
    assert group is not None
    if group not in _registries:
        _registries[group] = ProcessRegistry()
    return _registries[group]


def store() -> Store:
    """Return the key-value store of the default group, under the prefix of bigload."""
    return PrefixStore("bigload", _get_default_store())


def has_key(key: str) -> bool:
    """Return whether the store has `key`."""
    with store_errors():
        return bool(store().check([key]))


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn errors of the store into errors of bigload."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            None,
            f"the store of the process group can no longer be reached ({first_line(error)})",
            hint="the process that keeps it has ended, mostly process 0; see what it said",
        ) from error


def group_timeout_seconds() -> float:
    """Return the timeout of the process group: how long a process waits for others to come."""
    return float(store().timeout.total_seconds())  # type: ignore[attr-defined]  # its stubs lack it


@dataclass(frozen=True, slots=True)
class Poll:
    """One look during a wait: the time since its start, and whether connections may be probed."""

    waited_seconds: float
    may_probe: bool


def polls() -> Iterator[Poll]:
    """Yield without end, and sleep a little longer after each; signals such as Ctrl-C are served in between."""
    start = time.monotonic()
    probed = 0.0
    while True:
        waited = time.monotonic() - start
        may_probe = waited > probed + _PROBE_SECONDS
        probed = waited if may_probe else probed
        yield Poll(waited, may_probe)
        time.sleep(min(max(waited / 8, 0.0005), _LONGEST_SLEEP_SECONDS))


def timed_out(rank: int | None, missing: str, waited_seconds: float) -> RankError:
    """Return the error of a wait for a process that took too long."""
    hint = "all processes have to come here; give init_process_group a longer timeout if one takes that long"
    return RankError(rank, f"it {missing} in {waited_seconds:.0f} s", hint=hint)


def _identity_key(rank: int) -> str:
    return f"identity/{rank}"
