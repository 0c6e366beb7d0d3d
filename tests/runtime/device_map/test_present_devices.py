"""A device map for accelerators on a machine without them is refused before anything is loaded or moved."""

import pytest
import torch
from safetensors.torch import save_file

import bigload
from bigload.errors import DeviceNotPresentError
from bigload.runtime.device_map.present_devices import check_devices_present


def build():
    return torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))


@pytest.fixture
def no_accelerator():
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_file(build().state_dict(), "mlp.safetensors")
    return tmp_path


def empty():
    with bigload.init_empty_weights():
        return build()


def dispatched(plan):
    with bigload.dispatch(empty(), plan):
        pass


ACTS = {
    "load_and_dispatch": lambda plan: bigload.load_and_dispatch(empty(), plan),
    "load_checkpoint_and_dispatch": lambda plan: bigload.load_checkpoint_and_dispatch(
        empty(), "mlp.safetensors", plan.device_map
    ),
    "load_checkpoint_in_model": lambda plan: bigload.load_checkpoint_in_model(
        empty(), "mlp.safetensors", plan.device_map
    ),
    "dispatch": dispatched,
    "dispatch_model": lambda plan: bigload.dispatch_model(build(), plan.device_map),
    "cpu_offload": lambda plan: bigload.cpu_offload(build(), 0),
    "disk_offload": lambda plan: bigload.disk_offload(build(), "off", 0),
}


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_a_plan_for_gpus_is_refused_where_there_are_none(folder, act):
    plan = bigload.plan("mlp.safetensors", {"cuda:0": "3KiB", "cpu": "1MiB"}, overhead=0)
    assert {0, "cpu"} <= set(plan.device_map.values())
    with pytest.raises(DeviceNotPresentError, match="torch cannot use it, it sees no") as caught:
        act(plan)
    assert "-m auto" in caught.value.hint
    assert caught.value.modules


@pytest.mark.usefixtures("no_accelerator")
def test_the_message_names_the_device_and_what_goes_there():
    with pytest.raises(DeviceNotPresentError) as caught:
        check_devices_present({"a": "cpu", "b": "cuda:1", "c": "disk", "d": "cuda:1", "": "cuda:1"})
    assert str(caught.value).startswith(
        "3 modules of the device map cannot go to cuda:1: torch cannot use it, it sees none of kind cuda"
    )
    assert caught.value.modules == ("b", "d", "")
    with pytest.raises(DeviceNotPresentError, match="accelerator 7: torch cannot use it, it sees no accelerator"):
        check_devices_present({"": 7})


def test_what_is_there_passes():
    check_devices_present({"a": "cpu", "b": "disk", "c": torch.device("cpu"), "d": "meta"})
