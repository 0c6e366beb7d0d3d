"""One process goes first, of all or of each host, and the others come after it: to download, convert or cache once.

The first leaves word in the store of the process group when it has begun, and how it ended. So the others learn that it
failed, and with what; and no collective operation runs into its timeout while the first takes its time.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from bigload.distributed.barriers import must_meet
from bigload.distributed.process_group import ahead
from bigload.distributed.process_index import is_local_main_process, is_main_process
from bigload.errors import BigloadError, RankError

if TYPE_CHECKING:
    from bigload.distributed.process_order import Turn

_LINGER_SECONDS = 3.0
"""How long a process that failed stays to be heard: its end may take the store along."""

_TRACEBACK_LINES = 16

_turn: ContextVar[Turn | None] = ContextVar("bigload_turn", default=None)
"""The innermost block that this process is in. Blocks within it are counted apart, since who failed has had more."""

_unheard: ContextVar[list[Turn] | None] = ContextVar("bigload_unheard", default=None)
"""What this process did first, and others have not come to yet: in the outermost block that it is the first in."""


@contextmanager
def main_process_first() -> Iterator[None]:
    """Run the block in process 0, and when it is done there, in all others; to be entered by all.

    Process 0 may take as long as it likes; when it is done, it waits until the others have come, and goes on. If its
    block raises anything, Ctrl-C and `sys.exit` included, so do the others instead of running theirs.

    Raises:
        MainProcessFailedError: (in the others) the block raised in process 0, which is told, or that process is gone.
        RankError: another process has ended, or has not come within the timeout of the process group.
        ProcessControlError: there are several processes and no process group.
    """
    with _in_turn("main_process_first", is_local=False):
        yield


@contextmanager
def local_main_process_first() -> Iterator[None]:
    """Run the block in process 0 of each host, and when it is done there, in the others of that host.

    Otherwise as `main_process_first`; a failure on one host does not reach the others.

    Raises:
        MainProcessFailedError: (in the others of the host) the block raised in its process 0, or that process is gone.
        RankError: another process has ended, or has not come within the timeout of the process group.
        ProcessControlError: there are several processes and no process group.
    """
    with _in_turn("local_main_process_first", is_local=True):
        yield


@contextmanager
def _in_turn(function: str, *, is_local: bool) -> Iterator[None]:
    if not must_meet(function, may_be_ahead=True):
        yield
        return
    from bigload.distributed.process_order import Turn

    goes_first = is_local_main_process() if is_local else is_main_process()
    turn = Turn(function, is_local=is_local, within=_turn.get())
    if not goes_first:
        turn.wait_for_first()
    entered = _turn.set(turn)
    try:
        if goes_first:
            with _goes_first(turn):
                yield
        else:
            yield
    finally:
        _turn.reset(entered)


@contextmanager
def _goes_first(turn: Turn) -> Iterator[None]:
    outer = _unheard.get()
    unheard = [] if outer is None else outer
    turn.begin()
    unheard.append(turn)
    tokens = ahead.set(turn.function), _unheard.set(unheard)
    try:
        yield
    except BaseException as error:
        with suppress(RankError):  # what happened here is the better reason
            turn.leave_word(failed=_reason(error), traceback=_traceback(error))
            if outer is None:
                turn.wait_for_others(_LINGER_SECONDS)
                turn.forget()
        raise
    finally:
        ahead.reset(tokens[0])
        _unheard.reset(tokens[1])
    turn.leave_word(failed=None, traceback=[])
    if outer is None:  # those who wait for an outer block come to an inner one after it
        for each in unheard:
            each.wait_for_others()
            each.forget()


def _reason(error: BaseException) -> str:
    if isinstance(error, BigloadError):
        return f"{type(error).__name__}: {error.message}"
    return f"{''.join(traceback.format_exception_only(error)).strip():.1000}"


def _traceback(error: BaseException) -> list[str]:
    """Return where it was raised, from the block on."""
    steps = error.__traceback__
    while steps is not None and steps.tb_frame.f_globals is globals():
        steps = steps.tb_next
    lines = "".join(traceback.format_tb(steps)).splitlines()
    return [f"{line:.300}" for line in lines[-_TRACEBACK_LINES:]]
