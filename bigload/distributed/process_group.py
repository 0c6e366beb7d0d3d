"""Process groups: ranks that do the same calls at the same time, each its share of the work.

This module has the interface, the group of a single process, and the propagation of errors to all ranks. It does not
import torch; `joining.py` finds or makes the group of a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Protocol, TypeVar

from bigload.errors import BigloadError, ProcessControlError, RankError

T = TypeVar("T")

running_first_block: ContextVar[str | None] = ContextVar("bigload_running_first_block", default=None)
"""Name of the `*_process_first` block that this process runs while the others wait for it, or None."""


class ProcessGroup(Protocol):
    """Processes that make the same calls at the same time.

    Attributes:
        rank: The number of this process, from 0 on. Rank 0 does what is done once.
        size: The number of processes.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order; waits for all ranks, for days if need be.

        Args:
            value: A value that JSON gives back equal: no tuples, and text as the keys of dicts. It travels as JSON
                because unpickling a message would run whatever its sender put into it.

        Raises:
            TypeError: JSON does not give `value` back.
        """


class SingleProcess:
    """Process group of this process alone."""

    rank = 0
    size = 1

    def all_gather(self, value: T) -> list[T]:
        """Return `[value]`."""
        return [value]


def to_json(value: object) -> bytes:
    """Return `value` as JSON.

    Raises:
        TypeError: it would come back as something else: tuples as lists, numbers that are keys as text.
    """
    encoded = json.dumps(value).encode()
    if json.loads(encoded) != value:
        raise TypeError(f"{type(value).__name__} that JSON gives back as something else: {value!r:.200}")
    return encoded


def run_on_all_ranks(group: ProcessGroup, step: Callable[[], T]) -> T:
    """Run `step` in every process and return its result in this one; if it fails in one, raise in all.

    A Ctrl-C is neither a result nor an error and is not sent: the other ranks notice that this process ends.

    Raises:
        Exception: what `step` raised in this process.
    """
    try:
        result = step()
    except Exception as error:
        with suppress(RankError):  # the error of this process is the better reason
            group.all_gather(_failure(error, group))
        raise
    success: list[int | str | None] | None = None
    for failure in group.all_gather(success):
        if failure is not None:
            rank, reason, hint = failure
            assert rank is None or isinstance(rank, int)
            raise RankError(rank, str(reason), hint=None if hint is None else str(hint))
    return result


def _failure(error: Exception, group: ProcessGroup) -> list[int | str | None]:
    """Return the rank that failed, if it is known, the error text and the hint: a list, as JSON has no tuples."""
    if isinstance(error, RankError):
        return [error.rank, error.reason, error.hint]
    if isinstance(error, BigloadError):
        return [group.rank, f"{type(error).__name__}: {error.message}", error.hint]
    return [group.rank, f"{type(error).__name__}: {error}", None]


_PLACE_IN_GLOO = re.compile(r"\[\S+:\d+\] ")
_ADVICE_OF_GLOO = " This is typically caused by"


def first_line(error: BaseException) -> str:
    """Return the first line of the text of an error of torch, or its class name.

    torch may append a C++ stack; gloo puts a place in its source before the text, and advice behind it.
    """
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return _PLACE_IN_GLOO.sub("", line.partition(_ADVICE_OF_GLOO)[0], count=1)[:300]


def check_not_in_first_block(function: str) -> None:
    """Raise if all processes have to call `function` and the others wait for this one to leave its block."""
    if (block := running_first_block.get()) is not None:
        raise ProcessControlError(
            f"{function} would wait for ever: the others wait for this process to leave {block}",
            hint=f"call it after the block of {block}",
        )
