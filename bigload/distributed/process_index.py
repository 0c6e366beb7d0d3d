"""Which process is this, and how many are there: asked of torch.distributed, or else of what the launcher said.

torch is not imported for it. Where this process has not imported `torch.distributed`, no process group is initialised
either, and a program that runs alone gets its answers at once.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import update_wrapper
from types import ModuleType
from typing import Generic, TypeVar

from bigload.distributed.launchers import launched_place, local_place
from bigload.errors import ProcessControlError

T = TypeVar("T")


def process_group() -> ModuleType | None:
    """Return `torch.distributed` if its default process group is initialised, and `None` if it is not."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed


class _Answer(Generic[T]):
    """A function whose answer is not the function itself: where one is tested or compared, the call was forgotten."""

    def __init__(self, function: Callable[[], T]) -> None:
        update_wrapper(self, function)
        self._function = function

    def __call__(self) -> T:
        return self._function()

    def __bool__(self) -> bool:
        raise self._forgotten("has no truth value")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            raise self._forgotten(f"cannot be compared with {other!r}")
        return self is other

    __hash__ = object.__hash__

    def _forgotten(self, what: str) -> ProcessControlError:
        name = self._function.__name__
        return ProcessControlError(
            f"bigload.{name} is a function, and {what}",
            hint=f"call it, bigload.{name}(), or ask the property bigload.PartialState().{name}",
        )


@_Answer
def num_processes() -> int:
    """Return how many processes there are: those of the default process group, else those that were launched, else 1.

    Raises:
        ProcessOptionError: a launcher's variable makes no sense (so do the functions below).
    """
    group = process_group()
    if group is not None:
        return int(group.get_world_size())
    place = launched_place()
    return 1 if place is None else place.size


@_Answer
def process_index() -> int:
    """Return the number of this process among all of them, from 0 on."""
    group = process_group()
    if group is not None:
        return int(group.get_rank())
    place = launched_place()
    return 0 if place is None else place.rank


@_Answer
def local_process_index() -> int:
    """Return the number of this process among those of its host, from 0 on.

    Launchers say it: LOCAL_RANK of torchrun, and the like of Open MPI, MPICH and Slurm. Where none has, processes are
    counted that have a lower rank and the same host; they are waited for, until they too have called a function that
    asks where they are, or one that all of them take part in.

    Raises:
        ProcessControlError: it is not told, and there is no process group to ask.
        RankError: a process of a lower rank does not say where it is.
    """
    if num_processes() == 1:
        return 0
    place = local_place(process_index(), num_processes())
    if place.local_rank is not None:
        return place.local_rank
    if process_group() is None:
        raise ProcessControlError(
            f"cannot tell which of the {num_processes()} processes share this host",
            hint="call torch.distributed.init_process_group() first, or set LOCAL_RANK in each",
        )
    from bigload.distributed.liveness import roll_call

    return roll_call().num_before()


@_Answer
def is_main_process() -> bool:
    """Return whether this is process 0 of all; true where there is one alone."""
    return process_index() == 0


@_Answer
def is_local_main_process() -> bool:
    """Return whether this is process 0 of its host; see `local_process_index`, whose errors it raises."""
    return local_process_index() == 0


@_Answer
def is_last_process() -> bool:
    """Return whether this is the process with the highest number; true where there is one alone."""
    return process_index() == num_processes() - 1


def print(*values: object, **options: object) -> None:  # noqa: A001 - the name that accelerate's callers know
    """Print on one process of each host, as the builtin does, of which these are the arguments.

    `from bigload import *` leaves it out, so that it does not take the place of the builtin.
    """
    if is_local_main_process():
        builtins.print(*values, **options)  # type: ignore[call-overload]  # noqa: T201 - what it is for
