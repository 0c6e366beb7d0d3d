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
    """Answer requests; leave without the end of the interpreter, which might wait for threads of others."""
    began = time.perf_counter()
    _die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=connection.close)
    threading.Thread(target=_end_with, args=(connection,), name="bigload-orphan-watch", daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whom to interrupt is for the other side to decide
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the one that computes
    try:
        _serve(connection, int(os.environ["RANK"]), began)
    except EOFError:
        os._exit(_ORPHANED)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: of a stopped process, no thread sees a hang-up.

    If the parent has ended already, the connection says so.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _end_with(connection: socket.socket) -> None:
    """End this process when the other side closes, in the middle of a collective too: it has then ended itself."""
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is told whatever is asked for
    poll.poll()
    os._exit(_ORPHANED)


def _serve(connection: socket.socket, rank: int, began: float) -> None:
    """Answer until asked to stop. What a request raises is its answer.

    Raises:
        EOFError: the other side is gone.
    """
    from bigload.parallel.workers.messages import pack, receive, send, unpack
    from bigload.parallel.workers.requests import Call, Failure, Start, Stop
    from bigload.parallel.workers.worker_model import HostedModel

    import_seconds = time.perf_counter() - began
    hosted: HostedModel | None = None
    while True:
        received = receive(connection)
        try:
            request = unpack(received)
            if isinstance(request, Stop):
                return
            if isinstance(request, Start):
                hosted = HostedModel(request, rank, import_seconds=import_seconds)
                message = pack(hosted.report)
            else:
                assert hosted is not None
                message = pack(hosted.call(request) if isinstance(request, Call) else hosted.memory())
        except BaseException as error:
            failure = Failure(kind=type(error).__name__, text=str(error), traceback=traceback.format_exc())
            message = pack(failure)
        send(connection, message)
