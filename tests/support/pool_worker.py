"""A worker without torch, for tests of pools: it does as it is told, and speaks the protocol in words of its own."""

import os
import pickle
import signal
import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from bigload.parallel.workers import worker_main as worker

REQUESTS = "bigload.parallel.workers.requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    kind: str
    text: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Stop:
    pass


def main():
    # The real module imports torch, and what is pickled names its classes, not theirs.
    sys.modules[REQUESTS] = requests = ModuleType(REQUESTS)
    for kind in (WorkerFailure, Stop):
        kind.__module__ = REQUESTS
        setattr(requests, kind.__name__, kind)
    worker._serve = serve
    worker.main()


def serve(connection, rank, began):
    while True:
        _, pickled = read(connection)
        told = pickle.loads(pickled)
        if isinstance(told, Stop):
            return None if "deaf" not in os.environ else time.sleep(100)
        word, _, who = told.partition(" ")
        answer = act(word, rank) if not who or int(who) == rank else wait_for_others()
        connection.sendall(framed(pickle.dumps(answer)))


def act(word, rank):
    return ACTS[word](rank)


def talk(rank):
    sys.stdout.write("x" * 100_000 + f"\nI am {rank}\n")


def leave(rank):
    sys.stdout.write("going\n")
    os._exit(9)


def fork(rank):
    if child := os.fork():
        return child
    time.sleep(100)
    os._exit(0)


def interrupt(rank):
    """Interrupt the process that waits for the answer, which does not come."""
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(100)


def descriptors(rank):
    """Return how many are open, without that of its own library which libffi keeps open in Debian."""
    return sum("/libffi.so" not in str(each.resolve()) for each in Path("/proc/self/fd").iterdir())


ACTS = {
    "rank": lambda rank: rank,
    "environment": lambda rank: {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "OF_WORKERS_ALONE")},
    "talk": talk,
    "fail": lambda rank: WorkerFailure(kind="ValueError", text=f"no {object()}", traceback=f"in line {rank}"),
    "fail_apart": lambda rank: WorkerFailure(kind="ValueError", text=f"no, says {rank}", traceback=f"in line {rank}"),
    "exit": leave,
    "kill": lambda rank: os.kill(os.getpid(), signal.SIGKILL),
    "abort": lambda rank: os.abort(),
    "sleep": lambda rank: time.sleep(100),
    "interrupt": interrupt,
    "fork": fork,
    "descriptors": descriptors,
}


def wait_for_others():
    """As in a collective that somebody has left."""
    time.sleep(100)


def framed(*parts):
    parts = (pickle.dumps([]), *parts)
    return struct.pack(f"<{1 + len(parts)}Q", len(parts), *map(len, parts)) + b"".join(parts)


def read(connection):
    (count,) = struct.unpack("<Q", exactly(connection, 8))
    lengths = struct.unpack(f"<{count}Q", exactly(connection, 8 * count))
    return [exactly(connection, length) for length in lengths]


def exactly(connection, count):
    found = b""
    while len(found) < count:
        more = connection.recv(count - len(found))
        if not more:
            raise EOFError
        found += more
    return found
