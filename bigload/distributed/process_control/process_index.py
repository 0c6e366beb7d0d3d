"""Rank and size queries, answered by torch.distributed, else by the environment variables of a launcher.

torch is not imported for them: where this process has not imported `torch.distributed`, no process group is initialised
either.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from functools import update_wrapper
from types import ModuleType
from typing import Generic, TypeVar

from bigload.distributed.launchers import launched_on_host, launched_process
from bigload.errors import ProcessControlError

T = TypeVar("T")


def initialized_torch_distributed() -> ModuleType | None:
    """Return `torch.distributed` if its default process group is initialised, and `None` if it is not."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed


class _Query(Generic[T]):
    """A function that raises where it is tested or compared itself: in accelerate it is a property, without a call."""

    def __init__(self, function: Callable[[], T]) -> None:
        update_wrapper(self, function)
        self._function = function

    def __call__(self) -> T:
        return self._function()

    def __bool__(self) -> bool:
        raise self._missing_call("has no truth value")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):
            raise self._missing_call(f"cannot be compared with {other!r}")
        return self is other

    __hash__ = object.__hash__

    def _missing_call(self, what: str) -> ProcessControlError:
        name = self._function.__name__
        return ProcessControlError(
            f"bigload.{name} is a function, and {what}",
            hint=f"call it, bigload.{name}(), or ask the property bigload.PartialState().{name}",
        )


@_Query
def num_processes() -> int:
    """Return how many processes there are: those of the default process group, else those that were launched, else 1.

    Raises:
        OptionError: a launcher's variable makes no sense (so do the functions below).
    """
    if (distributed := initialized_torch_distributed()) is not None:
        return int(distributed.get_world_size())
    launched = launched_process()
    return 1 if launched is None else launched.size


@_Query
def process_index() -> int:
    """Return the number of this process among all of them, from 0 on."""
    if (distributed := initialized_torch_distributed()) is not None:
        return int(distributed.get_rank())
    launched = launched_process()
    return 0 if launched is None else launched.rank


@_Query
def local_process_index() -> int:
    """Return the number of this process among those of its host, from 0 on.

    Launchers set it: LOCAL_RANK of torchrun, and the like of Open MPI, MPICH and Slurm. Without a launcher, processes
    of the same host with a lower rank are counted. This waits until they too have called this function or a collective
    one.

    Raises:
        ProcessControlError: no launcher has set it, and there is no process group.
        RankError: a process of a lower rank does not publish its host.
    """
    if num_processes() == 1:
        return 0
    launched = launched_on_host(process_index(), num_processes())
    if launched.local_rank is not None:
        return launched.local_rank
    if initialized_torch_distributed() is None:
        raise ProcessControlError(
            f"cannot tell which of the {num_processes()} processes share this host",
            hint="call torch.distributed.init_process_group() first, or set LOCAL_RANK in each",
        )
    from bigload.distributed.liveness import process_registry

    registry = process_registry()
    return len(registry.on_this_host(range(registry.rank)))


@_Query
def is_main_process() -> bool:
    """Return whether this is process 0 of all; true where there is one alone."""
    return process_index() == 0


@_Query
def is_local_main_process() -> bool:
    """Return whether this is process 0 of its host; see `local_process_index`, whose errors it raises."""
    return local_process_index() == 0


@_Query
def is_last_process() -> bool:
    """Return whether this is the process with the highest number; true where there is one alone."""
    return process_index() == num_processes() - 1


def print(*values: object, **options: object) -> None:  # noqa: A001 - the name that accelerate's callers know
    """Print on one process of each host, as the builtin does, of which these are the arguments.

    `from bigload import *` leaves it out, so that it does not take the place of the builtin.
    """
    if is_local_main_process():
        builtins.print(*values, **options)  # type: ignore[call-overload]  # noqa: T201 - what it is for
