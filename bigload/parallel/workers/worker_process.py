"""Handle of one worker process: its connection, output, exit code and stack."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from multiprocessing.spawn import get_executable
from queue import SimpleQueue
from typing import TypeVar

from bigload.errors import MAX_LISTED, ParallelError, WorkerError

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bigload.parallel.workers.worker_main import main; main()"
)
T = TypeVar("T")

_EXIT_SECONDS = 1.0
_STACK_SECONDS = 1.0
_STACK_LINES = 7


class WorkerProcess:
    """A fresh interpreter that runs `worker_main`, in a session of its own, which gets no Ctrl-C of the terminal."""

    def __init__(
        self, rank: int, *, environment: Mapping[str, str], inherit: Sequence[int] = (), preload: Sequence[str] = ()
    ) -> None:
        self.rank = rank
        self.connection, theirs = socket.socketpair()
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            # -P: no folder of the script goes before the standard library; -u: the last output of a worker is not lost.
            arguments = [json.dumps(sys.path), str(theirs.fileno()), *preload]
            start = partial(
                subprocess.Popen[bytes],
                [_executable(), "-P", "-u", "-c", _BOOT, *arguments],
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(), *inherit),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._process = _starter.run(start)
        except BaseException:
            self.connection.close()
            self._output.close()
            raise
        finally:
            theirs.close()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return its exit code, minus the number of the signal that ended it, or `None` while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, `seconds` at most."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def log(self, num_bytes: int = 8192, *, since: int = 0) -> str:
        """Return the end of its output."""
        size = self._output_bytes()
        start = max(since, size - num_bytes)
        # pread, as the worker shares the offset of this descriptor and writes there.
        return os.pread(self._output.fileno(), size - start, start).decode(errors="replace").strip()

    def stacks(self) -> str:
        """Return the stack of its main thread, innermost call first; nothing if it does not arrive in time."""
        before = after = self._output_bytes()
        self._process.send_signal(signal.SIGUSR1)  # faulthandler writes it, whatever the interpreter does
        until = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < until:
            time.sleep(0.05)
            size = self._output_bytes()
            if size == after > before:
                break
            after = size
        return "\n".join(self.log(since=before).splitlines()[:_STACK_LINES])

    def death(self, doing: str) -> WorkerError:
        """Return the error of its end; it has closed its connection."""
        self.wait(_EXIT_SECONDS)
        self.kill()
        code = self._process.wait()
        log = self.log()
        written = log.rstrip().splitlines()[-MAX_LISTED + 1 :]
        return WorkerError(
            f"worker {self.rank} ended with {_ending(code)} while {doing}",
            reason="died",
            rank=self.rank,
            exit_code=code,
            log=log,
            details=("last lines of its output:", *written) if written else ("it wrote no output",),
            hint="the kernel sends SIGKILL when memory runs out; see dmesg"
            if code == -signal.SIGKILL
            else "all workers have been ended; call parallelize again",
        )

    def kill(self) -> None:
        """Kill it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Wait for its end, and close connection and output."""
        self._process.wait()
        self.connection.close()
        self._output.close()

    def _output_bytes(self) -> int:
        return os.fstat(self._output.fileno()).st_size


def _executable() -> str:
    found = get_executable()  # programs that embed Python set it
    if not found:
        raise ParallelError(
            "no Python interpreter is known that could run workers",
            hint="set it with multiprocessing.set_executable(path)",
        )
    return os.fsdecode(found)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class _StarterThread:
    """A daemon thread that starts all workers and lives as long as this process.

    PR_SET_PDEATHSIG of prctl(2), by which a worker is killed with its parent, means the parent's thread: a worker that
    a short-lived thread has started would be killed when that thread ends. A thread pool would end its threads at exit
    before workers are asked to stop.
    """

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], T]) -> T:
        """Run `task` in the thread, and return or raise its result."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="bigload-worker-starter", daemon=True)
                self._thread.start()
        future: Future[T] = Future()
        self._tasks.put(partial(_complete, future, task))
        try:
            return future.result()
        finally:
            wait([future])  # after a Ctrl-C too: the task uses what the caller is about to close

    def _work(self) -> None:
        while True:
            self._tasks.get()()


def _complete(future: Future[T], task: Callable[[], T]) -> None:
    try:
        future.set_result(task())
    except BaseException as error:
        future.set_exception(error)


_starter = _StarterThread()


def _renew_starter_after_fork() -> None:
    global _starter  # noqa: PLW0603 - a forked process has none of its parent's threads
    _starter = _StarterThread()


os.register_at_fork(after_in_child=_renew_starter_after_fork)
