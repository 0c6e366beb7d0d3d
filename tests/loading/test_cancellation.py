"""Loads stopped half-way, by Ctrl-C, a progress callback or a read error, leave nothing behind: in a real process.

One program runs all cases, one after the other, so that torch is imported once. It counts its threads, descriptors and
memory before and after each; the test sends Ctrl-C.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest

from bigload.units import MIB
from builders import header_of, write_raw

NUM_FILES, FILE_BYTES = 3, 96 * MIB

PROGRAM = """
import gc, json, os, signal, sys, threading, time
import torch
import bigload
from bigload.errors import ReadError
from bigload.checkpoint.byte_source import PositionalReader

lock = threading.Lock()


class Source:
    '''Reads as usual; reports when the third read has begun, and then fails or waits for Ctrl-C as `how` asks.

    It and the reads after it go on only once the load has been stopped: `is_stopped` is observed, not timed.
    '''

    how, begun, num_bytes, is_stopped = "", 0, 0, lambda: True

    def __init__(self, path):
        self.path, self.reader = path, PositionalReader(path)

    def read_into(self, buffers, offset):
        with lock:
            Source.begun += 1
            number = Source.begun
        self.reader.read_into(buffers, offset)
        with lock:
            Source.num_bytes += sum(buffer.nbytes for buffer in buffers)
        if Source.how == "error" and number == 3:
            failed = threading.current_thread()
            Source.is_stopped = lambda: not failed.is_alive()  # a thread ends after it has stopped the others
            raise ReadError(self.path, "this disk is broken")
        if Source.how in ("signal", "error") and number >= 3:
            if Source.how == "signal" and number == 3:
                print("reading", flush=True)
            give_up = time.monotonic() + 60
            while not Source.is_stopped() and time.monotonic() < give_up:
                time.sleep(0.005)

    def close(self):
        self.reader.close()


def interrupt(*_):
    sys.setprofile(note_waiting)
    raise KeyboardInterrupt


def note_waiting(frame, event, function):
    # The main thread stops its workers first, and then waits for them.
    if event == "c_call" and function.__name__ == "get":
        sys.setprofile(None)
        Source.is_stopped = lambda: True


class Unwatchable(Exception):
    pass


def refuse(progress):
    if progress.done_bytes >= progress.total_bytes // 8:
        raise Unwatchable


def held():
    gc.collect()
    with open("/proc/self/status") as status:
        private = next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
    return {"threads": len(os.listdir("/proc/self/task")), "files": len(os.listdir("/proc/self/fd")), "bytes": private}


def stopped(how, threads, folder):
    Source.how, Source.begun, Source.num_bytes, Source.is_stopped = how, 0, 0, lambda: False
    with torch.device("meta"):
        model = torch.nn.Module()
        for name, tensor in bigload.open_checkpoint(folder).tensors.items():
            model.register_parameter(name, torch.nn.Parameter(torch.empty(tensor.shape)))
    watch = {"on_progress": refuse} if how == "callback" else {}
    before, ended_with = held(), None
    try:
        bigload.load(folder, into=model, threads=threads, open_source=Source, **watch)
    except (KeyboardInterrupt, Unwatchable, ReadError) as error:
        ended_with = type(error).__name__
    sys.setprofile(None)
    begun = Source.begun
    for _ in range(100):  # a thread that was joined is on the kernel's list for a moment longer
        if len(os.listdir("/proc/self/task")) <= before["threads"]:
            break
        time.sleep(0.01)
    after = held()
    time.sleep(0.1)
    return {
        "how": how,
        "threads": threads,
        "ended_with": ended_with,
        "read_bytes": Source.num_bytes,
        "begun_later": Source.begun - begun,
        "before": before,
        "after": after,
        "is_meta": all(parameter.is_meta for parameter in model.parameters()),
    }


signal.signal(signal.SIGINT, interrupt)
folder = sys.argv[1]
bigload.load(folder, only=["w0"])  # whatever is imported or allocated once
gc.collect()
gc.freeze()  # all of that, which a collection need not look at again
for how in ("signal", "callback", "error"):
    for threads in (1, 4):
        print(json.dumps(stopped(how, threads, folder)), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    weight_map = {}
    for number in range(NUM_FILES):
        name = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        path = write_raw(folder / name, header_of({f"w{number}": ("F32", [FILE_BYTES // 4])}))
        os.truncate(path, path.stat().st_size + FILE_BYTES)  # a hole: nothing has to be written first
        weight_map[f"w{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)]
    found = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("reading"):
                process.send_signal(signal.SIGINT)
            else:
                outcome = json.loads(line)
                found[outcome["how"], outcome["threads"]] = outcome
    assert process.returncode == 0
    return found


@pytest.mark.parametrize(
    ("how", "ended_with"), [("signal", "KeyboardInterrupt"), ("callback", "Unwatchable"), ("error", "ReadError")]
)
@pytest.mark.parametrize("threads", [1, 4])
def test_a_load_that_is_stopped_leaves_no_read_thread_descriptor_or_memory_and_the_module_as_it_was(
    outcomes, how, ended_with, threads
):
    outcome = outcomes[how, threads]
    assert outcome["ended_with"] == ended_with
    assert 0 < outcome["read_bytes"] < NUM_FILES * FILE_BYTES / 2
    assert outcome["begun_later"] == 0
    before, after = outcome["before"], outcome["after"]
    assert (after["threads"], after["files"]) == (before["threads"], before["files"])
    assert after["bytes"] - before["bytes"] < 16 * MIB < outcome["read_bytes"]
    assert outcome["is_meta"]
