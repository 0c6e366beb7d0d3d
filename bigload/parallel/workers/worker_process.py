"""One worker as the process that started it sees it: a process, a connection, and what it writes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing.spawn import get_executable

from bigload.errors import ParallelError, WorkerDiedError
from bigload.parallel.workers.lasting_thread import in_lasting_thread

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from bigload.parallel.workers.worker_main import main; main()"
)
_EXIT_SECONDS = 1.0
_STACK_SECONDS = 1.0
_STACK_LINES = 7


class WorkerProcess:
    """A fresh interpreter that runs `worker_main`, in a session of its own: Ctrl-C is not for it."""

    def __init__(self, rank: int, *, environment: Mapping[str, str], inherit: Sequence[int] = ()) -> None:
        self.rank = rank
        self.connection, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`
        try:
            # -P: no folder but those of this process goes before the standard library; -u: what is written is not lost.
            command = [_executable(), "-P", "-u", "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())]
            start = partial(
                subprocess.Popen[bytes],
                command,
                env={**os.environ, **environment},
                pass_fds=(theirs.fileno(), *inherit),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._process = in_lasting_thread(start)
        except BaseException:
            self.connection.close()
            self._log.close()
            raise
        finally:
            theirs.close()

    @property
    def process_id(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return how it ended: 0, another number, or that of a signal, negative; `None` while it runs."""
        return self._process.poll()

    def written(self, num_bytes: int = 8192, *, since: int = 0) -> str:
        """Return the last of what it wrote."""
        size = self._log_bytes()
        start = max(since, size - num_bytes)
        # Not by seeking: the worker writes where this file stands, which is one for both.
        return os.pread(self._log.fileno(), size - start, start).decode(errors="replace").strip()

    def stacks(self) -> str:
        """Return where its main thread is, the last calls first; nothing if it does not say in time."""
        before = after = self._log_bytes()
        self._process.send_signal(signal.SIGUSR1)  # faulthandler answers, whatever else is going on
        until = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < until:
            time.sleep(0.05)
            size = self._log_bytes()
            if size == after > before:
                break
            after = size
        return "\n".join(self.written(since=before).splitlines()[:_STACK_LINES])

    def death(self, doing: str) -> WorkerDiedError:
        """Return the error that says how it ended; it has closed its connection."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        return WorkerDiedError(self.rank, doing, exit_code=code, ending=_ending(code), log=self.written())

    def kill(self) -> None:
        """End it, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()

    def close(self) -> None:
        """Wait for its end, and give back what this process has of it."""
        self._process.wait()
        self.connection.close()
        self._log.close()

    def _log_bytes(self) -> int:
        return os.fstat(self._log.fileno()).st_size


def _executable() -> str:
    found = get_executable()  # what multiprocessing would start, which programs that embed Python set
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
