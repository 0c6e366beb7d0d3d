"""One `*_process_first` block: the keys in the store by which its processes hear of each other, and their waits.

the first process                         each of the others
begin: publish its identity ───────────▶  wait_for_first: poll until the result is there, or the first has ended
(runs its block, however long)
publish: done, or the error ───────────▶  arrive
wait_for_others ◀───────────────────────  (runs its block)
remove_keys: the store may end with this process
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypedDict

from bigload.distributed.liveness import (
    ProcessIdentity,
    group_timeout_seconds,
    has_key,
    is_gone,
    polls,
    process_registry,
    store,
    store_errors,
    timed_out,
)
from bigload.errors import ProcessControlError, RankError

_EXIT_SECONDS = 1.0
"""Seconds after its connections are closed in which a killed process has surely ended."""


class _Status(TypedDict):
    """Value of the first process's key: its identity, and when it is done, the error of its block, if any."""

    first: dict[str, Any]
    is_done: bool
    failed: str | None
    traceback: list[str]


class FirstBlock:
    """One entry of this process, by a call of `function`, into a block that one process runs before the others.

    These are the processes of this host if `is_local`, else all; `outer` is the block around this one. `counts` are of
    the blocks of each function that were entered within this one: per outer block, because a process whose outer block
    failed has not entered the inner ones.
    """

    def __init__(self, function: str, *, is_local: bool, outer: FirstBlock | None) -> None:
        self.function = function
        self.counts: dict[str, int] = {}
        self._registry = process_registry()
        self._is_local = is_local
        self._first: ProcessIdentity | None = None
        counts = self._registry.counts if outer is None else outer.counts
        number = counts[function] = counts.get(function, 0) + 1
        # The same in all processes; a block around this one may be that of a host.
        self._name: str = f"{'' if outer is None else outer._name + '/'}{function}-{number}"
        self._key = f"{self._name}@{self._registry.own.node}" if is_local else self._name

    def begin(self) -> None:
        """Publish that this process is the first, and its identity."""
        with store_errors():
            num_firsts = store().add(self._num_firsts_key, 1)
        if num_firsts == 1:
            self.publish(is_done=False)
        self.arrive()
        if num_firsts > 1:
            raise ProcessControlError(
                f"{self.function} has several processes that are number 0 on {self._registry.own.node}",
                hint="give each process of a host its own LOCAL_RANK, and each host its own GROUP_RANK or name",
            )

    def arrive(self) -> None:
        """Publish that this process has come to this block and read the result of the first, if it is not the first."""
        with store_errors():
            store().set(self._arrival_key(self._registry.rank), "")

    def publish(self, *, is_done: bool, failed: str | None = None, traceback: list[str] | None = None) -> None:
        """Publish that the first process has begun its block, or has ended it: well, or with an error."""
        status = _Status(first=asdict(self._registry.own), is_done=is_done, failed=failed, traceback=traceback or [])
        with store_errors():
            store().set(self._key, json.dumps(status))

    def wait_for_first(self) -> None:
        """Wait until the first process is done, without a limit once it has begun."""
        try:
            status = self._result()
            self.arrive()
        except RankError as error:
            rank = self._first_rank
            if error.rank is None and rank is not None and _ends_soon(rank, self._first):
                raise self._ended(rank) from error
            raise
        if status["failed"] is not None:
            rank = status["first"]["rank"]
            raise RankError(rank, status["failed"], function=self.function, traceback=status["traceback"])

    def _result(self) -> _Status:
        for poll in polls():
            status = self._status()
            if status is None:
                self._check_first_may_come(poll.waited_seconds, may_probe=poll.may_probe)
            elif status["is_done"]:
                return status
            elif self._is_first_gone(may_probe=poll.may_probe) and status == self._status():
                raise self._ended(status["first"]["rank"])
        raise AssertionError("polls() does not end")

    def _is_first_gone(self, *, may_probe: bool) -> bool:
        return self._first is not None and is_gone(self._first.rank, self._first, may_probe=may_probe)

    def _status(self) -> _Status | None:
        if not has_key(self._key):
            return None
        with store_errors():
            status: _Status = json.loads(store().get(self._key))
        self._first = ProcessIdentity(**status["first"])
        return status

    def _check_first_may_come(self, waited_seconds: float, *, may_probe: bool) -> None:
        rank = self._first_rank
        if rank is not None and self._registry.has_ended(rank, may_probe=may_probe) and self._status() is None:
            raise self._ended(rank)
        if waited_seconds > group_timeout_seconds():
            raise timed_out(rank, f"has not come to {self.function}", waited_seconds)

    @property
    def _first_rank(self) -> int | None:
        """The rank of the first process, `None` for that of a host before it has come."""
        if self._first is not None:
            return self._first.rank
        return None if self._is_local else 0

    def _ended(self, rank: int) -> RankError:
        return RankError(rank, "it has ended, or can no longer be reached", function=self.function)

    def wait_for_others(self, limit_seconds: float | None = None) -> None:
        """Wait until all others have read the result, by default at most for the timeout of the process group."""
        keys = {rank: self._arrival_key(rank) for rank in self._ranks(limit_seconds)}
        self._registry.wait_for_keys(keys, f"has not come to {self.function}", limit_seconds=limit_seconds)

    def remove_keys(self) -> None:
        """Remove the keys of this block from the store; all processes have read them."""
        with store_errors():
            for rank in self._ranks(None):
                store().delete_key(self._arrival_key(rank))
            store().delete_key(self._num_firsts_key)
            store().delete_key(self._key)

    def _ranks(self, limit_seconds: float | None) -> list[int]:
        ranks = range(self._registry.size)
        return self._registry.on_this_host(ranks, limit_seconds) if self._is_local else list(ranks)

    @property
    def _num_firsts_key(self) -> str:
        return f"{self._key}/firsts"

    def _arrival_key(self, rank: int) -> str:
        return f"{self._key}/arrived/{rank}"


def _ends_soon(rank: int, identity: ProcessIdentity | None) -> bool:
    for poll in polls():
        if is_gone(rank, identity, may_probe=poll.may_probe):
            return True
        if poll.waited_seconds > _EXIT_SECONDS:
            return is_gone(rank, identity, may_probe=True)
    raise AssertionError("polls() does not end")
