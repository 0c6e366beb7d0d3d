"""Transfers to a real accelerator, where there is one; those to simulated ones are in `tests/simulated`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

from bigload.loading.staging.accelerators import free_bytes
from bigload.loading.staging.device_transfers import Transfers
from bigload.machine.threads.activities import Recorder
from transfer_jobs import numbers, send_all

BLOCK = 1 << 16


def test_the_promises_hold_on_simulated_accelerators():
    """In a process of its own, because torch lets nobody unregister a device type; see `simulated_accelerator.py`."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch takes no device type from Python")
    measured = ["coverage", "run", "-m"] if "coverage" in sys.modules else []
    folder = Path(__file__).parents[2] / "simulated"
    command = [sys.executable, "-m", *measured, "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    environment = {**os.environ, "BIGLOAD_SIMULATED": "1"}
    ended = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment, cwd=folder.parents[1], timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def transfers_to(device, num_blocks=3):
    return Transfers(device, block_bytes=BLOCK, num_blocks=num_blocks, recorder=Recorder(is_tracing=False))


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32, torch.float16])
def test_cuda_gets_every_byte_cast_on_the_way(device, wanted, threads):
    host = numbers(1_000_001, torch.bfloat16)
    there = torch.empty(1_000_001, dtype=wanted, device=device)
    with transfers_to(device) as transfers:
        assert transfers.is_pinned
        send_all(transfers, host, there, threads=threads, block_bytes=BLOCK, offset=5)
    assert torch.equal(there.cpu(), host.to(wanted))


@pytest.mark.gpu
def test_cuda_gets_columns_of_rows(device):
    matrix = numbers(100 * 64, torch.bfloat16).view(100, 64)
    there = torch.empty((100, 7), device=device)
    with transfers_to(device) as transfers:
        block = transfers.take()
        block.memory[: matrix.nbytes] = bytes(matrix.view(-1).view(torch.uint8).tolist())
        transfers.send_rows(block, 20, there, num_rows=100, row_bytes=14, stride_bytes=128, dtype=torch.bfloat16)
        transfers.release(block)
    assert torch.equal(there.cpu(), matrix[:, 10:17].float())


@pytest.mark.gpu
def test_cuda_memory_that_a_kernel_has_yet_to_leave_is_not_written_before(device):
    """The caching allocator gives the destination memory that kernels of the caller's stream still fill."""
    host, side = numbers(1_000_000), torch.cuda.Stream(device)
    with torch.cuda.stream(side):
        for _ in range(20):
            torch.cuda._sleep(2_000_000)
            old = torch.zeros(1_000_000, device=device).fill_(7)
            del old
        there = torch.empty(1_000_000, device=device)
        with transfers_to(device) as transfers:
            send_all(transfers, host, there, threads=2, block_bytes=BLOCK)
    assert torch.equal(there.cpu(), host)


@pytest.mark.gpu
def test_cuda_is_at_rest_after_an_error(device):
    def fault(begin):
        if begin > 300_000:
            raise OSError("the disk is gone")

    there = torch.empty(1_000_000, device=device)
    with pytest.raises(OSError, match="the disk is gone"), transfers_to(device) as transfers:
        send_all(transfers, numbers(1_000_000), there, threads=4, block_bytes=BLOCK, fault=fault)
    assert transfers._stream.query()


@pytest.mark.gpu
def test_cuda_tells_how_much_memory_is_free(device):
    before = free_bytes(device)
    taken = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    assert free_bytes(device) <= before - (1 << 28) + (1 << 26)  # others may use the device as well
    del taken
