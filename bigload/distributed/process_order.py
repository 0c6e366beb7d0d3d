"""One block that a process runs before others do: what they leave in the store for each other, and how they wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from bigload.distributed.liveness import Presence, late, naps, patience_seconds, roll_call, store, store_errors
from bigload.distributed.lost_connections import PROBE_SECONDS
from bigload.errors import MainProcessFailedError, ProcessControlError, RankError

_END_SECONDS = 1.0
"""How long after its connections are closed a process that was killed is surely gone."""


class _Word(TypedDict):
    """What the first says: where it is, and how its block ended when it is done."""

    first: dict[str, Any]
    is_done: bool
    failed: str | None
    traceback: list[str]


class Turn:
    """The first of some processes in a block, or one of those who come after it.

    Args:
        function: What the program called.
        is_local: The processes are those of this host, else all.
        within: The block around this one.

    Attributes:
        function: As above.
        num_turns: Blocks of each kind that were entered within this one.
    """

    def __init__(self, function: str, *, is_local: bool, within: Turn | None) -> None:
        self.function = function
        self.num_turns: dict[str, int] = {}
        self._call = roll_call()
        self._is_local = is_local
        self._first: Presence | None = None
        counts = self._call.num_turns if within is None else within.num_turns
        number = counts[function] = counts.get(function, 0) + 1
        # The same in all processes; a block around this one may be that of a host.
        self._name: str = f"{'' if within is None else within._name + '/'}{function}-{number}"
        self._key = f"{self._name}@{self._call.here.node}" if is_local else self._name

    def begin(self) -> None:
        """Say that this process is the first, and where it is.

        Raises:
            ProcessControlError: another one is the first, too.
            RankError: the store is gone (so do all methods).
        """
        with store_errors():
            num_firsts = store().add(self._firsts, 1)
        if num_firsts == 1:
            self._say(is_done=False)
        self.come()
        if num_firsts > 1:
            raise ProcessControlError(
                f"{self.function} has several processes that are number 0 on {self._call.here.node}",
                hint="give each process of a host its own LOCAL_RANK, and each host its own GROUP_RANK or name",
            )

    def come(self) -> None:
        """Say that this process is here, and has heard what there is to hear."""
        with store_errors():
            store().set(self._came(self._call.rank), "")

    def leave_word(self, *, failed: str | None, traceback: list[str]) -> None:
        """Say how the block of the first ended: with `None`, or with what was raised."""
        self._say(is_done=True, failed=failed, traceback=traceback)

    def _say(self, *, is_done: bool, failed: str | None = None, traceback: Sequence[str] = ()) -> None:
        word = _Word(first=asdict(self._call.here), is_done=is_done, failed=failed, traceback=list(traceback))
        with store_errors():
            store().set(self._key, json.dumps(word))

    def wait_for_first(self) -> None:
        """Wait until the first is done; it may take its time when it has begun.

        Raises:
            MainProcessFailedError: its block raised, or it has ended.
            RankError: it has not come within the timeout of the process group.
        """
        try:
            word = self._awaited_word()
            self.come()
        except RankError as error:
            if error.rank is None and self._first is not None and _ends(self._first):
                raise self._ended(self._first.rank) from error
            raise
        if word["failed"] is not None:
            assert self._first is not None
            raise MainProcessFailedError(
                self._first.rank, word["failed"], function=self.function, traceback=word["traceback"]
            )

    def _awaited_word(self) -> _Word:
        probed = 0.0
        for waited in naps():
            word = self._word()
            if word is None:
                is_time_to_probe = waited > probed + PROBE_SECONDS
                probed = waited if is_time_to_probe else probed
                self._check_coming(waited, may_probe=is_time_to_probe)
            elif word["is_done"]:
                return word
            elif self._first is not None and self._first.has_ended() and word == self._word():
                raise self._ended(self._first.rank)
        raise AssertionError("naps have no end")

    def _word(self) -> _Word | None:
        with store_errors():
            if not store().check([self._key]):
                return None
            word: _Word = json.loads(store().get(self._key))
        self._first = Presence(**word["first"])
        return word

    def _check_coming(self, waited_seconds: float, *, may_probe: bool) -> None:
        """See whether the first, of whom nothing was heard yet in this block, may still come."""
        rank = None if self._is_local else 0
        if rank is not None and self._call.has_ended(rank, may_probe=may_probe) and self._word() is None:
            raise self._ended(rank)
        if waited_seconds > patience_seconds():
            raise late(rank, f"has not come to {self.function}", waited_seconds)

    def _ended(self, rank: int) -> MainProcessFailedError:
        return MainProcessFailedError(rank, "it has ended, or was killed", function=self.function)

    def wait_for_others(self, limit_seconds: float | None = None) -> None:
        """Wait until all others have heard how it ended, for the timeout of the process group if no limit is given.

        Raises:
            RankError: one has ended, or does not come.
        """
        keys = {rank: self._came(rank) for rank in self._members(limit_seconds)}
        self._call.wait_for(keys, f"has not come to {self.function}", limit_seconds=limit_seconds)

    def forget(self) -> None:
        """Take everything out of the store again; all have heard it."""
        with store_errors():
            for rank in self._members(None):
                store().delete_key(self._came(rank))
            store().delete_key(self._firsts)
            store().delete_key(self._key)

    def _members(self, limit_seconds: float | None) -> list[int]:
        if self._is_local:
            return [self._call.rank, *self._call.neighbours(limit_seconds)]
        return list(range(self._call.size))

    @property
    def _firsts(self) -> str:
        return f"{self._key}/firsts"

    def _came(self, rank: int) -> str:
        return f"{self._key}/came/{rank}"


def _ends(presence: Presence) -> bool:
    for waited in naps():
        if presence.has_ended() or waited > _END_SECONDS:
            break
    return presence.has_ended()
