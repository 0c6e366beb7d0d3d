"""A worker: a process that answers requests until it is asked to stop, or until the process that started it is gone.

It is started by `worker_process.py` as `main`, with the number of its end of a socket pair as an argument.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback

_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""

_ORPHANED = 70
"""The exit code of a worker whose other side is gone (EX_SOFTWARE of sysexits.h). Nobody is there to see it."""


def main() -> None:
    """Answer requests; then exit without finalizing the interpreter, which might wait for threads of libraries."""
    began = time.perf_counter()
    _die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    threading.Thread(target=_exit_on_hang_up, args=(connection,), name="bigload-orphan-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started the workers handles it
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the thread that computes
    try:
        _serve(connection, int(os.environ["RANK"]), began)
    except EOFError:
        os._exit(_ORPHANED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: in a stopped process, no thread sees a hang-up.

    A parent that has ended before has closed the connection.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _exit_on_hang_up(connection: socket.socket) -> None:
    """End this process when the other side closes the connection, in the middle of a collective too."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    poll.poll()
    os._exit(_ORPHANED)


def _serve(connection: socket.socket, rank: int, began: float) -> None:
    """Answer requests until asked to stop. The answer to a request that raises is a `WorkerFailure`.

    Raises:
        EOFError: the process that started this one is gone.
    """
    from bigload.parallel.workers.messages import pack, receive, send, unpack
    from bigload.parallel.workers.requests import Call, Start, Stop, WorkerFailure
    from bigload.parallel.workers.worker_model import WorkerModel

    import_seconds = time.perf_counter() - began
    hosted: WorkerModel | None = None
    while True:
        received = receive(connection)
        try:
            request = unpack(received)
            if isinstance(request, Stop):
                return
            if isinstance(request, Start):
                hosted = WorkerModel(request, rank, import_seconds=import_seconds)
                message = pack(hosted.report)
            else:
                assert hosted is not None
                message = pack(hosted.call(request) if isinstance(request, Call) else hosted.memory())
        except BaseException as error:
            failure = WorkerFailure(kind=type(error).__name__, text=str(error), traceback=traceback.format_exc())
            message = pack(failure)
        send(connection, message)
