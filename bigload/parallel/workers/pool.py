"""Pool of worker processes that start, get each request, are watched and end together.

Each is a fresh interpreter and not a fork, so it inherits no threads and accelerator state, and does not run the user's
script again: that needs no `if __name__ == "__main__"`. The environment of this process and the start method of
multiprocessing stay as they are.

    this process ──socket pair──▶ worker 0 ┐
         │        └─socket pair──▶ worker 1 ┴─ a process group of torch.distributed, by a store of this process

Messages go over a socket pair. When a process ends, however it ends, the kernel closes its end, so the other side
notices at once. Standard output and error of a worker go to a file without a name; errors show its last lines.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait

from bigload.errors import MAX_LISTED, BigloadError, WorkerError, WorkerTimeoutError
from bigload.parallel.workers.messages import Message, pack, receive, send, unpack
from bigload.parallel.workers.requests import Stop, WorkerFailure
from bigload.parallel.workers.worker_process import WorkerProcess

GRACE_SECONDS = 5.0
"""Seconds for the other workers to answer after one failed, or to stop: they fail alike, or wait in a collective."""

LAG_SECONDS = 60.0
"""Seconds beyond twice the time of the first answer that the other workers may take: they do the same work."""

_STOPPED = "they were asked to stop"
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
    """Workers that get the same requests at the same time. Requests of several threads are serialized.

    A failure that leaves workers at different points of the work ends all of them, and later requests raise.
    """

    def __init__(
        self,
        size: int,
        *,
        environment: Mapping[str, str],
        inherit: Sequence[int] = (),
        preload: Sequence[str] = (),
        daemon: bool = True,
    ) -> None:
        """Start `size` processes and return while they import torch.

        They have this process's variables and those of `environment`, `inherit` descriptors under the same numbers, and
        `preload` modules before the first request. The end of this interpreter kills them if `daemon`, else it asks
        them to stop first.
        """
        self.size = size
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._reason: str | None = None
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _finalize, self._workers, self._owner, daemon=daemon)
        try:
            for rank in range(size):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._workers.append(WorkerProcess(rank, environment=own, inherit=inherit, preload=preload))
        except BaseException:
            self._end("they could not be started")
            raise
        _pools.add(self)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the workers, in the order of their ranks; none after they have ended."""
        return tuple(worker.process_id for worker in self._workers)

    def logs(self) -> tuple[str, ...]:
        """Return the last 64 KiB that each worker wrote to its standard output and error; nothing after they ended."""
        with self._lock:
            return tuple(worker.log(65536) for worker in self._workers)

    def ask(self, request: Message, doing: str, *, timeout: float | None = None) -> list[object]:
        """Send `request` to all workers, and return their answers in the order of their ranks.

        `doing` is for errors: `running forward`. All answers have to be there in `timeout` seconds, if there is a
        limit.
        """
        if os.getpid() != self._owner:  # before the lock, which a thread may have held when this process was forked
            raise _ended("this process was forked from the one that they belong to")
        with self._lock:
            if self._reason is not None:
                raise _ended(self._reason)
            try:
                answers = _Exchange(self._workers, doing, timeout).run(request)
                _raise_failures(answers, doing)
            except BaseException as error:  # an interrupt too: workers are at different points of the work
                if not (isinstance(error, WorkerError) and error.is_shared):
                    text = error.message if isinstance(error, BigloadError) else f"{type(error).__name__} while {doing}"
                    self._end(text)
                raise
            return answers

    def close(self) -> None:
        """Ask the workers to stop, and kill those that do not."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._reason is not None:
                return
            try:
                dead = _stop(self._workers)
                if dead is not None:
                    raise dead.death("stopping")
            finally:
                self._end(_STOPPED)

    def end(self, reason: str) -> None:
        """Kill the workers, unless they have ended; later requests raise an error with `reason`."""
        with self._lock:
            if self._reason is None:
                self._end(reason)

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._finalizer.detach()
        _kill(self._workers)


class _Exchange:
    """One request to all workers, and their answers."""

    def __init__(self, workers: Sequence[WorkerProcess], doing: str, timeout: float | None) -> None:
        self._workers = workers
        self._doing = doing
        self._timeout = timeout
        self._began = time.monotonic()
        self._deadline = None if timeout is None else self._began + timeout
        self._answers: dict[int, object] = {}

    def run(self, request: Message) -> list[object]:
        """Return the answers of all, among them the failures of some."""
        for worker in self._workers:
            self._transfer(worker, request)
        while missing := [worker for worker in self._workers if worker.rank not in self._answers]:
            ready = wait([worker.connection for worker in missing], self._remaining())
            if not ready and self._has_failed:
                break  # those that are missing wait for those that failed
            if not ready:
                raise self._timed_out(missing)
            for worker in missing:
                if worker.connection in ready:
                    self._answers[worker.rank] = self._transfer(worker)
                    self._shorten_deadline()
        return [self._answers.get(worker.rank) for worker in self._workers]

    @property
    def _has_failed(self) -> bool:
        return any(isinstance(answer, WorkerFailure) for answer in self._answers.values())

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _shorten_deadline(self) -> None:
        """Limit the wait for the others, once a worker has answered: they do the same work."""
        now = time.monotonic()
        soon = now + (GRACE_SECONDS if self._has_failed else LAG_SECONDS + now - self._began)
        self._deadline = soon if self._deadline is None else min(self._deadline, soon)

    def _transfer(self, worker: WorkerProcess, request: Message | None = None) -> object:
        """Send `request` to `worker`, or receive its answer, by the deadline."""
        left = self._remaining()
        worker.connection.settimeout(None if left is None else max(left, 0.001))  # 0 is non-blocking
        try:
            if request is None:
                return unpack(receive(worker.connection))
            send(worker.connection, request)
        except TimeoutError:
            raise self._timed_out([worker]) from None
        except (EOFError, OSError):
            raise worker.death(self._doing) from None
        return None

    def _timed_out(self, missing: Sequence[WorkerProcess]) -> WorkerTimeoutError:
        seconds = time.monotonic() - self._began
        return WorkerTimeoutError(
            [worker.rank for worker in missing],
            self._doing,
            seconds=round(seconds, 1),
            stacks={worker.rank: worker.stacks() for worker in missing},
        )


def _raise_failures(answers: Sequence[object], doing: str) -> None:
    failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, WorkerFailure)}
    if failures:
        rank, first = next(iter(failures.items()))
        # An object's text may have its address in it, which is another one in each process.
        texts = {(each.kind, re.sub(r"\b0x[0-9a-f]+", "", each.text)) for each in failures.values()}
        is_shared = len(failures) == len(answers) and len(texts) == 1
        hint = None if is_shared else "other workers did not raise it, so all have been ended; call parallelize again"
        raise WorkerError(
            f"worker {rank} raised {first.kind} while {doing}: {first.text}",
            reason="raised",
            rank=rank,
            kind=first.kind,
            worker_traceback=first.traceback,
            is_shared=is_shared,
            details=("traceback of the worker:", *first.traceback.rstrip().splitlines()[-MAX_LISTED + 1 :]),
            hint=hint,
        )


def _ended(reason: str) -> WorkerError:
    hint = "deparallelize the model, and parallelize it again"
    return WorkerError(f"the workers have ended: {reason}", reason="ended", hint=hint)


def _stop(workers: Sequence[WorkerProcess]) -> WorkerProcess | None:
    """Ask `workers` to stop and wait until they have; return one with another exit code than 0, if there is one."""
    message = pack(Stop())
    for worker in workers:
        worker.connection.settimeout(GRACE_SECONDS)
        with suppress(OSError):  # it has ended, as its exit code shows
            send(worker.connection, message)
    until = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.wait(max(0.0, until - time.monotonic()))
    return next((worker for worker in workers if worker.exit_code()), None)


def _kill(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()  # all of them before the first is waited for
    while workers:
        workers.pop().close()


def _finalize(workers: list[WorkerProcess], owner: int, *, daemon: bool) -> None:
    """End the workers of a pool that is garbage, or at exit of the interpreter."""
    if os.getpid() == owner:
        if not daemon:
            _stop(workers)
        _kill(workers)


def _close_connections_after_fork() -> None:
    """Close a fork's copies of the connections: with them open, workers would not notice the end of their process."""
    for pool in list(_pools):
        for worker in pool._workers:
            worker.connection.close()


os.register_at_fork(after_in_child=_close_connections_after_fork)
