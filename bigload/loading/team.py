"""Who works on one job: this process alone, or all ranks of torch.distributed, on one machine or several."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from bigload.errors import RankError

T = TypeVar("T")


class Team(Protocol):
    """Processes that do the same thing at the same time, each its share of it.

    Attributes:
        rank: The number of this process, from 0 on. Number 0 does what is done once.
        size: How many there are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def share(self, value: T) -> list[T]:
        """Return what all processes gave, in the order of their numbers; waits until all have.

        Raises:
            RankError: one of them is gone.
        """


class Alone:
    """A team of one process."""

    rank = 0
    size = 1

    def share(self, value: T) -> list[T]:
        """Return `[value]`."""
        return [value]


@contextmanager
def present_team() -> Iterator[Team]:
    """Give the ranks of torch.distributed where this process has joined them already, and else a team of one."""
    distributed = sys.modules.get("torch.distributed")  # not imported: then it is not initialised either
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        yield Alone()
        return
    from bigload.loading.torch_team import torch_team

    with torch_team() as team:
        yield team


@contextmanager
def launched_team() -> Iterator[Team]:
    """Give the ranks that a launcher such as torchrun started, by what it set in the environment; else a team of one.

    Raises:
        RankError: the others cannot be reached.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        yield Alone()
        return
    from bigload.loading.torch_team import torch_team

    with torch_team() as team:
        yield team


def together(team: Team, step: Callable[[], T]) -> list[T]:
    """Have every process do its `step`, and return all results by rank; if one fails, all raise.

    Raises:
        RankError: `step` failed in another process, which is named with what it said.
        Exception: what `step` raised, here.
    """
    error: BaseException | None = None
    result: list[T] = []
    try:
        result.append(step())
    except Exception as raised:
        error = raised
    outcomes = team.share((None if error is None else f"{type(error).__name__}: {error}", result))
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(outcomes):
        if failure is not None:
            raise RankError(rank, failure)
    return [value for _, values in outcomes for value in values]
