"""A thread that lives as long as this process, to start others from.

PR_SET_PDEATHSIG of prctl(2), by which a worker is killed with its parent, means the parent's thread: a worker that a
short-lived thread has started would be killed when that thread ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class _LastingThread:
    """A daemon thread, started at its first task; the interpreter does not wait for it to end."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], T]) -> T:
        """Return what `task` returned there, or raise what it raised."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="bigload-worker-starter", daemon=True)
                self._thread.start()
        future: Future[T] = Future()
        self._tasks.put(lambda: _carry_out(task, future))
        try:
            return future.result()
        except BaseException:
            wait([future])  # after a Ctrl-C too: the task uses what the caller is about to close
            raise

    def _work(self) -> None:
        while True:
            self._tasks.get()()


def _carry_out(task: Callable[[], T], future: Future[T]) -> None:
    try:
        result = task()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


_lasting = _LastingThread()


def in_lasting_thread(task: Callable[[], T]) -> T:
    """Run `task` in a thread that lives as long as this process; return what it returned, or raise what it raised."""
    return _lasting.run(task)


def _forget_after_fork() -> None:
    global _lasting  # noqa: PLW0603 - a forked process has none of its parent's threads
    _lasting = _LastingThread()


os.register_at_fork(after_in_child=_forget_after_fork)
