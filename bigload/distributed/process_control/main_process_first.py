"""`main_process_first` and `local_main_process_first`: one process runs a block before the others do.

Unlike accelerate's two barriers, the first process publishes its identity and then its result or exception under a key
in the process group's store. So the others learn that it failed, and with what; and no collective operation runs into
its timeout while the first takes its time.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from bigload.distributed.process_control.barriers import has_other_processes
from bigload.distributed.process_control.process_index import is_local_main_process, is_main_process
from bigload.distributed.process_group import running_first_block
from bigload.errors import BigloadError, RankError

if TYPE_CHECKING:
    from bigload.distributed.process_control.first_block import FirstBlock

_LINGER_SECONDS = 3.0
"""Seconds that a failed process waits for the others to read its error: the store may end with the process."""

_TRACEBACK_LINES = 16

_innermost: ContextVar[FirstBlock | None] = ContextVar("bigload_first_block", default=None)
"""The innermost block that this process is in."""

_unread: ContextVar[list[FirstBlock] | None] = ContextVar("bigload_unread_first_blocks", default=None)
"""Blocks that this process ran first and that others may not have come to yet, if it is the first of an outer block."""


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in process 0, and when it is done there, in all others; all processes enter it.

    Process 0 may take any time; when it is done, it waits until the others have come. If its block raises anything,
    Ctrl-C and `sys.exit` included, the others raise an error instead of running theirs.

    Raises:
        RankError: (in the others) the block raised in process 0, or that process is gone.
        RankError: another process has ended, or has not come within the timeout of the process group.
        ProcessControlError: there are several processes and no process group.
    """
    with _first_block("main_process_first", is_local=False):
        yield


@contextmanager
def local_main_process_first() -> Iterator[None]:
    """Run the block in process 0 of each host, and when it is done there, in the others of that host.

    Otherwise as `main_process_first`; a failure on one host does not reach the others.

    Raises:
        RankError: (in the others of the host) the block raised in its process 0, or that process is gone.
        RankError: another process has ended, or has not come within the timeout of the process group.
        ProcessControlError: there are several processes and no process group.
    """
    with _first_block("local_main_process_first", is_local=True):
        yield


@contextmanager
def _first_block(function: str, *, is_local: bool) -> Iterator[None]:
    if not has_other_processes(function, may_be_in_first_block=True):
        yield
        return
    from bigload.distributed.process_control.first_block import FirstBlock

    goes_first = is_local_main_process() if is_local else is_main_process()
    block = FirstBlock(function, is_local=is_local, outer=_innermost.get())
    if not goes_first:
        block.wait_for_first()
    token = _innermost.set(block)
    try:
        if goes_first:
            with _runs_first(block):
                yield
        else:
            yield
    finally:
        _innermost.reset(token)


@contextmanager
def _runs_first(block: FirstBlock) -> Iterator[None]:
    outer = _unread.get()
    unread = [] if outer is None else outer
    block.begin()
    unread.append(block)
    tokens = running_first_block.set(block.function), _unread.set(unread)
    try:
        yield
    except BaseException as error:
        with suppress(RankError):  # the error of this process is the better reason
            block.publish(is_done=True, failed=_reason(error), traceback=_traceback(error))
            if outer is None:
                block.wait_for_others(_LINGER_SECONDS)
                block.remove_keys()
        raise
    finally:
        running_first_block.reset(tokens[0])
        _unread.reset(tokens[1])
    block.publish(is_done=True)
    if outer is None:  # those who wait for an outer block come to an inner one after it
        for each in unread:
            each.wait_for_others()
            each.remove_keys()


def _reason(error: BaseException) -> str:
    if isinstance(error, BigloadError):
        return f"{type(error).__name__}: {error.message}"
    return f"{''.join(traceback.format_exception_only(error)).strip():.1000}"


def _traceback(error: BaseException) -> list[str]:
    """Return the last lines of the traceback, from the block on."""
    steps = error.__traceback__
    while steps is not None and steps.tb_frame.f_globals is globals():
        steps = steps.tb_next
    lines = "".join(traceback.format_tb(steps)).splitlines()
    return [f"{line:.300}" for line in lines[-_TRACEBACK_LINES:]]
