"""The blocks in which bytes are cast and gathered on the CPU."""

import threading

from bigload.loading.scheduling.read_jobs import Delivery, Destination, ReadJob
from bigload.loading.staging import cpu_stager
from bigload.machine.memory.huge_pages import allocate
from bigload.machine.threads.activities import Recorder


class Letters:
    def read_into(self, buffers, offset):
        for buffer in buffers:
            buffer[:] = b"abcdefgh"[offset : offset + buffer.nbytes]


def test_blocks_are_as_many_as_jobs_at_one_moment_not_as_threads(monkeypatch):
    taken = []

    def counted(num_bytes):
        taken.append(num_bytes)
        return allocate(num_bytes)

    monkeypatch.setattr(cpu_stager, "allocate", counted)
    memory = allocate(4)
    stager = cpu_stager.HostStager([memory], Recorder(is_tracing=False))
    for column in range(4):  # each in a thread of its own, one after the other
        job = ReadJob("file", 2 * column, 1, (Destination(0, 1, 0, column),), Delivery.STAGED)
        thread = threading.Thread(target=stager.deliver, args=(job, Letters()))
        thread.start()
        thread.join()
    stager.close()
    assert memory[:4] == b"aceg"
    assert len(taken) == 1
