"""On which device processes meet; that they do is tested with real ones, in test_main_process_first.py."""

from types import SimpleNamespace

import pytest
import torch

from bigload.distributed.process_control import barriers


@pytest.mark.parametrize(
    ("backends", "bound", "current", "local_index", "expected"),
    [
        ("cpu:gloo,cuda:gloo", None, 0, 1, "cpu"),
        ("cpu:gloo,cuda:nccl", None, 1, 1, "cpu"),
        ("cuda:nccl", None, 2, 1, "cuda:2"),  # set_device
        ("cuda:nccl", None, 0, 1, "cuda:1"),  # nobody has chosen
        ("cuda:nccl", None, 0, 5, "cuda:1"),  # more processes than accelerators
        ("cuda:nccl", "cuda:3", 0, 1, "cuda:3"),  # init_process_group(device_id=)
        ("cuda:nccl", None, 0, 0, "cuda:0"),
    ],
)
def test_processes_meet_on_the_cpu_or_on_the_accelerator_of_each(  # noqa: PLR0917
    monkeypatch, backends, bound, current, local_index, expected
):
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda: backends)
    monkeypatch.setattr(barriers, "_bound_device", lambda: None if bound is None else torch.device(bound))
    module = SimpleNamespace(current_device=lambda: current, device_count=lambda: 4)
    monkeypatch.setattr("torch.get_device_module", lambda kind: module)
    monkeypatch.setattr(barriers, "local_process_index", lambda: local_index)
    assert barriers.collective_device() == torch.device(expected)


def test_a_barrier_of_accelerators_is_told_the_device(monkeypatch):
    told = []

    def barrier(device_ids):
        told.append(device_ids)

    monkeypatch.setattr(barriers, "has_other_processes", lambda function: True)
    monkeypatch.setattr(barriers, "collective_device", lambda: torch.device("cuda", 3))
    monkeypatch.setattr("torch.distributed.barrier", barrier)
    barriers.wait_for_everyone()
    assert told == [[3]]
