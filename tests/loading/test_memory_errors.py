"""Memory that the system refuses, from wherever it was asked for."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import bigload
from bigload.errors import InvalidCheckpointError, NotEnoughMemoryError
from builders import make_checkpoint

REFUSED_BY_TORCH = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 8388608 bytes. Error code 12 (Cannot allocate memory)"
)

SWEEP = """
import gc, os, resource, sys
import torch, bigload
import bigload.loading.staging.cpu_stager, bigload.loading.tensors.legacy_torch
import bigload.checkpoint.formats.torch_archive
from bigload.errors import NotEnoughMemoryError

for _ in range(2):  # whatever is imported or made once
    for options in ({"method": "direct"}, {"method": "mmap"}, {"dtype": "float32"}):
        bigload.load(sys.argv[1], **options)
    bigload.load(sys.argv[2])
for path, options in ((1, {"method": "direct"}), (1, {"method": "mmap"}), (1, {"dtype": "float32"}), (2, {})):
    for more in (2 << 20, 6 << 20, 20 << 20, 40 << 20):
        child = os.fork()
        if not child:
            code = 3
            try:
                used = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGESIZE")
                resource.setrlimit(resource.RLIMIT_AS, (used + more,) * 2)
                bigload.load(sys.argv[path], **options)
                code = 0
            except NotEnoughMemoryError:
                code = 1
            except BaseException as error:
                print(more, options, repr(error)[:300], flush=True)
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), end=" ")
"""


@pytest.mark.slow
def test_under_a_limit_of_address_space_a_load_works_or_says_that_memory_is_short(tmp_path):
    folder = make_checkpoint(tmp_path / "model", blocks=2, hidden=512, vocab=1024)
    legacy = tmp_path / "legacy.bin"
    state = {name: tensor.clone() for name, tensor in bigload.load(folder).items()}
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    command = [sys.executable, "-c", SWEEP, str(folder), str(legacy)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    codes = done.stdout.split()
    assert len(codes) == 16, done.stdout
    assert set(codes) <= {"0", "1"}, done.stdout
    assert "1" in codes


def refuse(*_arguments, **_options):
    raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_is_a_lack_of_memory(tmp_path, monkeypatch):
    folder = make_checkpoint(tmp_path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NotEnoughMemoryError) as caught:
        bigload.load(folder, threads=2)
    assert "ulimit -v" in caught.value.hint


@pytest.mark.parametrize("error", [RuntimeError(REFUSED_BY_TORCH), MemoryError()])
def test_memory_that_torch_is_refused_for_an_old_file_is_no_fault_of_the_file(tmp_path, monkeypatch, error):
    path = tmp_path / "old.bin"
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)

    def fail(*_arguments, **_options):
        raise error

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(NotEnoughMemoryError, match="does not fit into memory"):
        bigload.load(path)
    error.args = ("something else",)
    with pytest.raises(InvalidCheckpointError if isinstance(error, RuntimeError) else NotEnoughMemoryError):
        bigload.load(path)


def test_memory_that_a_header_takes_too_much_of_is_told_as_such(tmp_path, monkeypatch):
    def fail(*_arguments, **_options):
        raise MemoryError

    folder = make_checkpoint(tmp_path)
    monkeypatch.setattr("bigload.checkpoint.formats.safetensors.parse_header", fail)
    with pytest.raises(NotEnoughMemoryError):
        bigload.load(folder)


@pytest.mark.parametrize("load", ["load_checkpoint_in_model", "load_checkpoint_and_dispatch"])
def test_memory_that_filling_a_model_is_refused_is_told_as_such(tmp_path, monkeypatch, load):
    def fail(*_arguments, **_options):
        raise RuntimeError(REFUSED_BY_TORCH)

    folder = make_checkpoint(tmp_path)
    monkeypatch.setattr("bigload.checkpoint.formats.safetensors.parse_header", fail)
    with pytest.raises(NotEnoughMemoryError):
        getattr(bigload, load)(torch.nn.Linear(2, 2), folder, device_map={"": "cpu"})
