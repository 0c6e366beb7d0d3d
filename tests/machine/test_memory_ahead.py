"""Memory that is faulted in ahead of a load: taken once, by a buffer of its size, and never beside another one."""

import threading
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

import bigload
from bigload.errors import NotEnoughMemoryError
from bigload.machine import memory_ahead as module
from bigload.machine.memory_ahead import memory_ahead, taken_ahead
from bigload.machine.process_memory import resident_memory
from bigload.units import MIB

SIZE = 64 * MIB


@contextmanager
def grown_by(num_bytes):
    before = resident_memory().private_bytes
    yield
    assert abs(resident_memory().private_bytes - before - num_bytes) < 16 * MIB


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "bigload memory ahead"]


def wait_for_memory():
    for thread in threads():
        thread.join()


def test_the_first_buffer_of_the_size_has_the_memory_and_the_second_has_not():
    with memory_ahead(SIZE):
        wait_for_memory()
        with grown_by(0):
            taken = taken_ahead(SIZE + 64)
            assert len(taken) >= SIZE + 64
            assert taken_ahead(SIZE) is None
    assert bytes(taken[:8]) == bytes(8)
    assert taken_ahead(SIZE) is None


@pytest.mark.parametrize("num_bytes", [1, SIZE - 1, 2 * SIZE])
def test_memory_of_another_size_than_is_needed_goes_back_at_once(num_bytes):
    with grown_by(0), memory_ahead(SIZE):
        wait_for_memory()
        assert taken_ahead(num_bytes) is None
        assert taken_ahead(SIZE) is None
        assert not threads()


def test_memory_that_nobody_took_goes_back_at_the_end():
    with grown_by(0):
        with memory_ahead(SIZE), grown_by(SIZE):
            wait_for_memory()
        assert not threads()


def test_a_lack_of_memory_is_left_to_the_load(monkeypatch):
    def refused(*_arguments):
        raise NotEnoughMemoryError("a buffer", needed_bytes=1, available_bytes=0, hint="less")

    monkeypatch.setattr(module, "prefault", refused)
    with memory_ahead(SIZE):
        wait_for_memory()
        assert taken_ahead(SIZE) is not None
    monkeypatch.setattr(module, "allocate", refused)
    with memory_ahead(SIZE):
        assert taken_ahead(SIZE) is None


def test_a_load_reads_into_it(tmp_path):
    tensors = {str(number): torch.randn(4096, 2048) for number in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    with memory_ahead(3 * 4096 * 2048 * 4):
        wait_for_memory()
        with grown_by(0):
            loaded = bigload.load(tmp_path, method="direct")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
