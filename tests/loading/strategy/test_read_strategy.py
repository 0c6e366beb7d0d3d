"""Threads by what is read, and by how many processes of the host read at the same time."""

import pytest
import torch
from safetensors.torch import save_file

import bigload
from bigload.distributed.host_share import HostShare
from bigload.loading.scheduling.schedule import RequestedTensor
from bigload.loading.settings import settings
from bigload.loading.strategy.read_strategy import PARALLEL_BYTES, choose_strategy, usual_threads
from bigload.machine.threads.activities import Recorder


@pytest.mark.parametrize(
    ("processes", "cores", "reading", "casting"),
    [(1, 2, 4, 2), (4, 0.5, 1, 1), (8, 0.25, 1, 1), (2, 3.5, 7, 3), (1, 64, 8, 4)],
)
def test_threads_follow_the_cores_of_this_process(processes, cores, reading, casting):
    share = HostShare(processes=processes, cores=cores)
    assert usual_threads(share, is_cast=False) == reading
    assert usual_threads(share, is_cast=True) == casting


@pytest.mark.parametrize(("processes", "threads"), [(1, 8), (4, 2), (64, 1)])
def test_processes_of_a_host_share_the_threads_at_its_disk(tmp_path, processes, threads):
    save_file({"a": torch.zeros(PARALLEL_BYTES, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    checkpoint = bigload.open_checkpoint(tmp_path)
    tensor = checkpoint.tensors["a"]
    share = HostShare(processes=processes, cores=1)
    for asked, expected in ((None, threads), (5, 5)):
        chosen = settings(threads=asked, method="direct", environ={})._replace(share=share)
        wanted = [RequestedTensor(tensor=tensor, dtype=tensor.dtype)]
        assert choose_strategy(checkpoint, wanted, chosen, None, Recorder(is_tracing=False)).threads == expected
