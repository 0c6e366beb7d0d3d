"""Thread pool that runs independent jobs, and stops all threads when one fails or the user interrupts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

MAX_DEFAULT_THREADS = 4

Job = TypeVar("Job")


def default_threads() -> int:
    """Return the default number of threads: one per core that this process may use, four at most."""
    return min(usable_cores(), MAX_DEFAULT_THREADS)


def usable_cores() -> int:
    """Return on how many cores this process may run; macOS and Windows bind no process to cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(work: Callable[[Job], None], jobs: Iterable[Job], *, threads: int) -> None:
    """Call `work` once for every job, in order of their start, on `threads` threads; 1 means the caller's own.

    When a call raises, no further job is started, the running ones are waited for, and the first error is raised here.
    The same holds for KeyboardInterrupt, so nothing still reads or writes when this function has returned. Only threads
    that wait in `abandonable` are left behind: there they wait for others, and then end without touching anything.
    """
    if threads < 1:
        raise ValueError(f"{threads} threads; expected 1 or more")
    if threads == 1:
        for job in jobs:
            work(job)
        return
    state = _PoolState(work, iter(jobs))
    workers = [threading.Thread(target=state.run, name=f"bigload-{number}", daemon=True) for number in range(threads)]
    try:
        for worker in workers:
            worker.start()
        while state.num_ended < threads and state.error is None:
            # A signal right before CPython begins to wait is handled after the wait, so Ctrl-C would wait for all jobs.
            with suppress(Empty):
                state.ended.get(timeout=1)
    finally:
        state.stop()
        state.wait_for_work()
        for worker in workers:
            if worker.ident is not None and not state.num_waiting:
                worker.join()
    if state.error is not None:
        error, state.error = state.error, None
        try:
            raise error
        finally:
            del error  # it holds this frame and the thread's, with all their buffers: a cycle would keep them


class PoolStoppedError(Exception):
    """The pool of the calling thread has stopped; it is raised in its threads only."""


@contextmanager
def abandonable() -> Iterator[None]:
    """Wait for a network in this context: a pool that stops does not wait for the end of it.

    What other threads may use must not be touched in the context: the caller of `run_jobs` may have gone on.

    Raises:
        PoolStoppedError: the pool of the calling thread has stopped, before or meanwhile.
    """
    pool: _PoolState[object] | None = getattr(_thread, "pool", None)
    if pool is None:
        yield
        return
    pool.begin_waiting()
    try:
        yield
    finally:
        pool.end_waiting()


_thread = threading.local()  # `pool`: that for which the thread works


class _PoolState(Generic[Job]):
    """The state that the threads of one `run_jobs` share.

    A thread that ends first counts itself in `num_ended`, then puts a token into `ended`; a thread
    missing from the count thus has a token still to come.
    """

    def __init__(self, work: Callable[[Job], None], jobs: Iterator[Job]) -> None:
        self.error: BaseException | None = None
        self.num_active = 0
        self.num_ended = 0
        self.num_waiting = 0
        self.ended: SimpleQueue[None] = SimpleQueue()
        self._work = work
        self._jobs = jobs
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Start no further job; also not from a thread that has yet to begin."""
        self._stopped = True

    def is_busy(self) -> bool:
        """Return whether a thread does more than wait for a network."""
        with self._lock:
            return self.num_active > self.num_waiting

    def wait_for_work(self) -> None:
        """Wait until no thread does more than wait for a network, whatever interrupts there are meanwhile."""
        # Not by join(): when Ctrl-C hits it, CPython takes the thread it waits for as ended (bpo-45274).
        is_busy = True
        while is_busy:
            with suppress(KeyboardInterrupt):
                if is_busy := self.is_busy():
                    self.ended.get()

    def begin_waiting(self) -> None:
        """Count the calling thread as one that can be left behind."""
        with self._lock:
            if self._stopped:
                raise PoolStoppedError
            self.num_waiting += 1

    def end_waiting(self) -> None:
        """Count the calling thread as one that works, unless all were stopped."""
        with self._lock:
            self.num_waiting -= 1
            if self._stopped:
                raise PoolStoppedError

    def run(self) -> None:
        """Do jobs until there are none, one fails, or all are stopped."""
        _thread.pool = self
        with self._lock:
            self.num_active += 1
        try:
            while (job := self._next()) is not None:
                self._work(job[0])
        except BaseException as error:  # re-raised in the caller's thread
            with self._lock:
                self.error = self.error or error
                self._stopped = True
        finally:
            with self._lock:
                self.num_active -= 1
                self.num_ended += 1
            self.ended.put(None)

    def _next(self) -> tuple[Job] | None:
        """Return the next job, wrapped so that a job may be anything; `None` when there is none or all stop."""
        with self._lock:
            if self._stopped:
                return None
            for job in self._jobs:
                return (job,)
            return None
