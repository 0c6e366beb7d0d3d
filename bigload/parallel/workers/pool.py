"""Worker processes: started, asked, watched and ended together.

Each is a fresh interpreter and not a fork, so threads and accelerators of this process are no matter to it, and the
script of the user is not run again: it needs no `if __name__ == "__main__"`. Nothing of this process is changed to
start them, neither its environment nor how multiprocessing starts processes.

    this process ──socket pair──▶ worker 0 ┐
         │        └─socket pair──▶ worker 1 ┴─ a process group of torch.distributed, by a store of this process

A socket pair is how they talk, and how either notices that the other is gone: the kernel closes the ends of a process
however it ended. What a worker writes goes to a file without a name, of which errors show the end.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait

from bigload.errors import BigloadError, WorkerError, WorkersEndedError, WorkerTimeoutError
from bigload.parallel.workers.messages import Message, pack, receive, send, unpack
from bigload.parallel.workers.requests import Failure, Stop
from bigload.parallel.workers.worker_process import WorkerProcess

GRACE_SECONDS = 5.0
"""How long others may go on when one has failed, or when they are asked to stop: they come to the same, or never."""

LAG_SECONDS = 60.0
"""How long others may go on when one has finished, beside the time that it took: the same work takes all as long."""

_STOPPED = "they were asked to stop"
_pools: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


class WorkerPool:
    """Workers that are asked the same thing at the same time. Several threads may ask; they take turns.

    After a failure that leaves workers in different places, all have been ended, and the pool is of no more use.
    """

    def __init__(
        self, size: int, *, environment: Mapping[str, str], inherit: Sequence[int] = (), daemon: bool = True
    ) -> None:
        """Start `size` processes. They import torch meanwhile; the first request makes them ready.

        Args:
            size: How many.
            environment: Variables of theirs alone, beside those of this process.
            inherit: Descriptors that they get, under the same numbers.
            daemon: Whether they are ended at once where this interpreter ends, or asked to stop first.
        """
        self.size = size
        self._turn = threading.Lock()
        self._owner = os.getpid()
        self._reason: str | None = None
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, _leave, self._workers, self._owner, daemon=daemon)
        try:
            for rank in range(size):
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._workers.append(WorkerProcess(rank, environment=own, inherit=inherit))
        except BaseException:
            self._end("they could not be started")
            raise
        _pools.add(self)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the workers, in the order of their ranks; none after they have ended."""
        return tuple(worker.process_id for worker in self._workers)

    @property
    def is_ended(self) -> bool:
        return self._reason is not None

    def logs(self) -> tuple[str, ...]:
        """Return the last 64 KiB that each worker wrote to its standard output and error; nothing after they ended."""
        with self._turn:
            return tuple(worker.written(65536) for worker in self._workers)

    def ask(self, request: Message, doing: str, *, timeout: float | None = None) -> list[object]:
        """Send `request` to all workers, and return their answers in the order of their ranks.

        Args:
            request: What `pack` made of a request.
            doing: What they do, for errors: `running forward`.
            timeout: Seconds after which it is given up; `None` waits.

        Raises:
            WorkerError: one of them raised. Where all raised the same, the pool stays as it is.
            WorkerDiedError: one of them ended by itself.
            WorkerTimeoutError: there was no answer in time, or one came to an end and others did not.
            WorkersEndedError: they were ended before.
        """
        if os.getpid() != self._owner:  # before the lock, which a thread may have held when this process was forked
            raise WorkersEndedError("this process was forked from the one that they belong to")
        with self._turn:
            if self._reason is not None:
                raise WorkersEndedError(self._reason)
            try:
                answers = _Exchange(self._workers, doing, timeout).run(request)
                _raise_failures(answers, doing)
            except WorkerError as error:
                if not error.is_shared:
                    self._end(error.message)
                raise
            except BaseException as error:  # an interrupt too: nobody knows where the workers are
                self._end(error.message if isinstance(error, BigloadError) else f"{type(error).__name__} while {doing}")
                raise
            return answers

    def close(self) -> None:
        """Ask the workers to stop, and end those that do not.

        Raises:
            WorkerDiedError: one of them ended in another way than by stopping.
        """
        if os.getpid() != self._owner:
            return
        with self._turn:
            if self._reason is not None:
                return
            try:
                dead = _stop(self._workers)
                if dead is not None:
                    raise dead.death("stopping")
            finally:
                self._end(_STOPPED)

    def end(self, reason: str) -> None:
        """End the workers without asking them, unless they have ended; `reason` is what later calls are told."""
        with self._turn:
            if self._reason is None:
                self._end(reason)

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._finalizer.detach()
        _end(self._workers)


class _Exchange:
    """A request sent to workers, and their answers."""

    def __init__(self, workers: Sequence[WorkerProcess], doing: str, timeout: float | None) -> None:
        self._workers = workers
        self._doing = doing
        self._timeout = timeout
        self._began = time.monotonic()
        self._until = None if timeout is None else self._began + timeout
        self._answers: dict[int, object] = {}

    def run(self, request: Message) -> list[object]:
        """Return the answers of all, among them the failures of some.

        Raises:
            WorkerDiedError, WorkerTimeoutError: see `WorkerPool.ask`.
        """
        for worker in self._workers:
            self._carefully(worker, request)
        while missing := [worker for worker in self._workers if worker.rank not in self._answers]:
            ready = wait([worker.connection for worker in missing], self._left())
            if not ready and self._has_failed:
                break  # those that are missing wait for those that failed
            if not ready:
                raise self._late(missing)
            for worker in missing:
                if worker.connection in ready:
                    self._answers[worker.rank] = self._carefully(worker)
                    self._hurry()
        return [self._answers.get(worker.rank) for worker in self._workers]

    @property
    def _has_failed(self) -> bool:
        return any(isinstance(answer, Failure) for answer in self._answers.values())

    def _left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def _hurry(self) -> None:
        """Set an end to the wait for the others: they do the same."""
        now = time.monotonic()
        soon = now + (GRACE_SECONDS if self._has_failed else LAG_SECONDS + now - self._began)
        self._until = soon if self._until is None else min(self._until, soon)

    def _carefully(self, worker: WorkerProcess, request: Message | None = None) -> object:
        """Send `request` to `worker`, or return what it answers."""
        left = self._left()
        worker.connection.settimeout(None if left is None else max(left, 0.001))  # 0 would not wait at all
        try:
            if request is None:
                return unpack(receive(worker.connection))
            send(worker.connection, request)
        except TimeoutError:
            raise self._late([worker]) from None
        except (EOFError, OSError):
            raise worker.death(self._doing) from None
        return None

    def _late(self, missing: Sequence[WorkerProcess]) -> WorkerTimeoutError:
        seconds = time.monotonic() - self._began
        return WorkerTimeoutError(
            [worker.rank for worker in missing],
            self._doing,
            seconds=round(seconds, 1),
            stacks={worker.rank: worker.stacks() for worker in missing},
        )


def _raise_failures(answers: Sequence[object], doing: str) -> None:
    failures = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, Failure)}
    if failures:
        rank, first = next(iter(failures.items()))
        is_shared = len(failures) == len(answers) and len({(each.kind, each.text) for each in failures.values()}) == 1
        raise WorkerError(
            rank, doing, kind=first.kind, text=first.text, worker_traceback=first.traceback, is_shared=is_shared
        )


def _stop(workers: Sequence[WorkerProcess]) -> WorkerProcess | None:
    """Ask `workers` to stop and wait until they have, or one has ended in another way, which is returned."""
    message = pack(Stop())
    for worker in workers:
        worker.connection.settimeout(GRACE_SECONDS)
        with suppress(OSError):  # it is gone, which its exit code says
            send(worker.connection, message)
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until:
        codes = [worker.exit_code() for worker in workers]
        if any(codes):
            return next(worker for worker, code in zip(workers, codes, strict=True) if code)
        if None not in codes:
            break
        time.sleep(0.005)
    return None


def _end(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.kill()  # all of them before the first is waited for
    while workers:
        workers.pop().close()


def _leave(workers: list[WorkerProcess], owner: int, *, daemon: bool) -> None:
    """End the workers of a pool that nobody refers to any more, or at the end of the interpreter."""
    if os.getpid() == owner:
        if not daemon:
            _stop(workers)
        _end(workers)


def _let_go_after_fork() -> None:
    """Close what a fork has of the connections. Else workers would not notice the end of the process they are of."""
    for pool in list(_pools):
        for worker in pool._workers:
            worker.connection.close()


os.register_at_fork(after_in_child=_let_go_after_fork)
