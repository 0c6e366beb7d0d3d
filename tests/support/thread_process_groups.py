"""Teams whose processes are threads of this one: the same calls, and the same ends, without starting anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TypeVar

from bigload.distributed.process_group import to_json
from bigload.errors import RankError

T = TypeVar("T")

PATIENCE_SECONDS = 60
"""Longer than anything here takes on a busy machine: who waits that long has been forgotten."""


class GoneError(BaseException):
    """What ends a thread as a signal ends a process: nobody catches it."""


class Meeting:
    """Where the threads of a team hear each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: list[dict[int, object]] = []
        self.gone: set[int] = set()


class ThreadProcessGroup:
    """One thread of a team; it is gone at its share number `dies_at`."""

    def __init__(self, meeting: Meeting, rank: int, *, dies_at: int | None = None) -> None:
        self.rank = rank
        self.size = meeting.size
        self.num_shares = 0
        self._meeting = meeting
        self._dies_at = dies_at

    def all_gather(self, value: T) -> list[T]:
        number, self.num_shares = self.num_shares, self.num_shares + 1
        if number == self._dies_at:
            raise GoneError
        meeting = self._meeting
        with meeting.changed:
            if len(meeting.rounds) <= number:
                meeting.rounds.append({})
            said = meeting.rounds[number]
            said[self.rank] = json.loads(to_json(value))  # as between processes
            meeting.changed.notify_all()

            def missing() -> set[int]:
                return meeting.gone - said.keys()

            assert meeting.changed.wait_for(lambda: len(said) == self.size or missing(), PATIENCE_SECONDS)
            if missing():
                raise RankError(min(missing()), "it can no longer be reached")
            return [said[rank] for rank in range(self.size)]

    def leave(self) -> None:
        with self._meeting.changed:
            self._meeting.gone.add(self.rank)
            self._meeting.changed.notify_all()


def outcomes(
    size: int, work: Callable[[ThreadProcessGroup], T], *, dies_at: dict[int, int] | None = None
) -> list[object]:
    """Have `size` threads do `work`, and return what each returned or raised; fail if one does not end."""
    meeting = Meeting(size)
    found: list[object] = [None] * size

    def run(team: ThreadProcessGroup) -> None:
        try:
            found[team.rank] = work(team)
        except BaseException as error:
            found[team.rank] = error
        finally:
            team.leave()

    teams = [ThreadProcessGroup(meeting, rank, dies_at=(dies_at or {}).get(rank)) for rank in range(size)]
    threads = [threading.Thread(target=run, args=(team,), daemon=True) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), f"{thread} waits forever"
    return found
