"""Functions that run in one process: asked when they are called, not when they are defined.

So a module may be imported before the processes know each other. What a function returns elsewhere is `None`; where a
process is alone, it runs, whatever number was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from bigload.distributed.process_control import process_index as processes
from bigload.errors import OptionError

P = ParamSpec("P")
T = TypeVar("T")


class _Decorator(Protocol):
    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | None]: ...


def on_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Have `function` run in process 0 alone; a decorator."""
    return _where(processes.is_main_process, function)


def on_local_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Have `function` run in process 0 of each host; a decorator."""
    return _where(processes.is_local_main_process, function)


def on_last_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Have `function` run in the process with the highest number; a decorator."""
    return _where(processes.is_last_process, function)


@overload
def on_process(function: Callable[P, T], process_index: int | None = None) -> Callable[P, T | None]: ...
@overload
def on_process(function: None = None, process_index: int | None = None) -> _Decorator: ...
def on_process(function: Callable[..., Any] | None = None, process_index: int | None = None) -> Callable[..., Any]:
    """Have `function` run in process `process_index` alone: `on_process(work, 2)`, or `@on_process(process_index=2)`.

    Raises:
        OptionError: `process_index` is no number of a process.
    """
    return _numbered(processes.process_index, process_index, function)


@overload
def on_local_process(function: Callable[P, T], local_process_index: int | None = None) -> Callable[P, T | None]: ...
@overload
def on_local_process(function: None = None, local_process_index: int | None = None) -> _Decorator: ...
def on_local_process(
    function: Callable[..., Any] | None = None, local_process_index: int | None = None
) -> Callable[..., Any]:
    """Have `function` run in process `local_process_index` of each host; called as `on_process`.

    Raises:
        OptionError: `local_process_index` is no number of a process.
    """
    return _numbered(processes.local_process_index, local_process_index, function)


def _numbered(index: Callable[[], int], number: object, function: Callable[..., Any] | None) -> Callable[..., Any]:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise OptionError.of(index.__name__, number, "the number of the process that runs it, from 0 on")

    def decorate(decorated: Callable[P, T]) -> Callable[P, T | None]:
        return _where(lambda: index() == number, decorated)

    return decorate if function is None else decorate(function)


def _where(is_here: Callable[[], bool], function: Callable[P, T]) -> Callable[P, T | None]:
    @wraps(function)
    def runs_or_not(*arguments: P.args, **options: P.kwargs) -> T | None:
        if processes.num_processes() == 1 or is_here():
            return function(*arguments, **options)
        return None

    return runs_or_not
