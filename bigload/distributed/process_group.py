"""Who works on one job: this process alone, or all ranks of torch.distributed, on one machine or several."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Protocol, TypeVar

from bigload.errors import BigloadError, ProcessControlError, RankError

T = TypeVar("T")

_Failure = list[int | str | None]
"""Rank of the process that failed, if known, and the error's text: a list, as JSON has it."""

LISTENER_THREAD_PREFIX = "bigload-team-"
"""How the names of threads begin that wait for other processes. There are none when a team has ended, or failed."""

ahead: ContextVar[str | None] = ContextVar("bigload_ahead", default=None)
"""The function for which this process does something before others do, who wait for it meanwhile."""


class ProcessGroup(Protocol):
    """Processes that do the same thing at the same time, each its share of it.

    Attributes:
        rank: The number of this process, from 0 on. Number 0 does what is done once.
        size: How many there are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, value: T) -> list[T]:
        """Return what all processes gave, in the order of their numbers; waits until all have, for days if need be.

        Args:
            value: What JSON can say and gives back equal: no tuples, and text as the keys of dicts. It travels as JSON
                because unpickling a message would run whatever its sender put into it.

        Raises:
            TypeError: JSON does not give `value` back.
            RankError: one of them is gone, which is noticed at once.
        """


def to_json(value: object) -> bytes:
    """Return `value` as JSON.

    Raises:
        TypeError: it would come back as something else: tuples as lists, numbers that are keys as text.
    """
    said = json.dumps(value).encode()
    if json.loads(said) != value:
        raise TypeError(f"{type(value).__name__} that JSON gives back as something else: {value!r:.200}")
    return said


class SingleProcess:
    """A team of one process."""

    rank = 0
    size = 1

    def all_gather(self, value: T) -> list[T]:
        """Return `[value]`."""
        return [value]


@contextmanager
def current_process_group() -> Iterator[ProcessGroup]:
    """Give the ranks of torch.distributed where this process has joined them already, and else a team of one.

    The process group is left as it is.

    Raises:
        RankError: the others do not come: all of them have to.
        ProcessControlError: the others wait for this process to leave a block such as that of `main_process_first`.
    """
    distributed = sys.modules.get("torch.distributed")  # not imported: then it is not initialised either
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        yield SingleProcess()
        return
    if (first := ahead.get()) is not None and distributed.get_world_size() > 1:
        raise ProcessControlError(
            f"what all processes do together cannot be done here: the others wait for this one to leave {first}",
            hint=f"call it outside of {first}: the processes share its work, and what is done once one of them does",
        )
    from bigload.distributed.torch_process_group import torch_process_group

    with torch_process_group() as team:
        yield team


@contextmanager
def launched_process_group() -> Iterator[ProcessGroup]:
    """Give the ranks that a launcher such as torchrun started, by what it set in the environment; else a team of one.

    Raises:
        RankError: the others do not come, or cannot be reached.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield SingleProcess()
        return
    from bigload.distributed.torch_process_group import torch_process_group

    with torch_process_group() as team:
        yield team


def run_on_all_ranks(team: ProcessGroup, step: Callable[[], T]) -> T:
    """Have every process do its `step`, and return what it gave here; if it fails in one, it fails in all.

    What is neither an error nor a result, such as a Ctrl-C, is not told the others: they notice that this process ends.

    Raises:
        RankError: `step` failed in another process, which is named with what it said; or that process is gone.
        Exception: what `step` raised, here.
    """
    try:
        result = step()
    except Exception as error:
        with suppress(RankError):  # what happened here is the better reason
            team.all_gather(_told(error, team))
        raise
    nothing: _Failure | None = None
    for failure in team.all_gather(nothing):
        if failure is not None:
            rank, reason = failure
            assert rank is None or isinstance(rank, int)
            raise RankError(rank, str(reason))
    return result


def _told(error: Exception, team: ProcessGroup) -> _Failure:
    """Return what the other processes are told of `error`: in which it came up, and what it was."""
    if isinstance(error, RankError):
        return [error.rank, error.reason]
    reason = error.message if isinstance(error, BigloadError) else str(error)
    return [team.rank, f"{type(error).__name__}: {reason}"]
