import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import bigload
from bigload.errors import DeviceMapError
from bigload.runtime.device_map.checks import check_devices_present


class Scaled(nn.Module):
    """A parameter and a buffer of its own, a child, and a state that is no tensor."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(2))
        self.register_buffer("offset", torch.empty(2))
        self.register_buffer("cache", torch.empty(2), persistent=False)
        self.inner = nn.Linear(2, 2)

    def get_extra_state(self):
        return {"steps": 3}

    def set_extra_state(self, state):
        """Take what get_extra_state() gave."""


def test_a_map_that_covers_the_state_dict_is_fine():
    bigload.check_device_map(Scaled(), {"": 0})
    bigload.check_device_map(Scaled(), {"scale": 0, "offset": "cpu", "inner": torch.device("cpu"), "_extra_state": 0})


def test_what_has_no_device_is_listed():
    with pytest.raises(ValueError, match=r"following parameters: offset, _extra_state, inner\.bias\n"):
        bigload.check_device_map(Scaled(), {"scale": 0, "inner.weight": 0})


def test_a_name_that_only_begins_alike_covers_nothing():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "ab": nn.Linear(1, 1)})
    with pytest.raises(ValueError, match=r"ab\.weight, ab\.bias"):
        bigload.check_device_map(model, {"a": 0})


def test_keys_that_name_nothing_are_warned_of():
    with pytest.warns(UserWarning, match=r"do not match any submodules in the model: \['innner', 'inner\.x\.y'\]"):
        bigload.check_device_map(Scaled(), {"": 0, "innner": 1, "inner.x.y": 1})


def test_parameters_and_buffers_are_keys_like_others():
    bigload.check_device_map(Scaled(), {"": 0, "scale": 1, "cache": 1, "inner.weight": "cpu"})


def test_siblings_on_one_device_become_their_parent():
    assert bigload.clean_device_map({"a": 0, "b": 0, "c": 0}) == {"": 0}
    assert bigload.clean_device_map({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "c": 1}) == {"a": 0, "b": 1, "c": 1}
    deep = {"a.x": 0, "a.y": 0, "b.x.0": 1, "b.x.1": 1, "b.y.0": 2, "b.y.1": 2, "c": 2}
    assert bigload.clean_device_map(deep) == {"a": 0, "b.x": 1, "b.y": 2, "c": 2}


def test_the_map_is_shortened_in_place_and_keeps_its_order():
    device_map = {"z.1": 1, "b": "cpu", "z.2": 1, "a": 0}
    assert bigload.clean_device_map(device_map) is device_map
    assert list(device_map.items()) == [("z", 1), ("b", "cpu"), ("a", 0)]


def test_a_single_key_stays_and_so_does_a_parent_with_another_device():
    assert bigload.clean_device_map({"a.x": 0}) == {"a.x": 0}
    assert bigload.clean_device_map({"a": 1, "a.x": 0, "a.y": 0}) == {"a": 1, "a.x": 0, "a.y": 0}


def test_only_what_lies_in_the_named_module_is_shortened():
    device_map = {"a.x.0": 0, "a.x.1": 0, "b.0": 1, "b.1": 1}
    assert bigload.clean_device_map(device_map, "a.x") == {"a.x": 0, "b.0": 1, "b.1": 1}


def device_of(name, device_map):
    while name not in device_map:
        assert name, "no device"
        name = name.rpartition(".")[0]
    return device_map[name]


names = st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(names, st.sampled_from([0, 1, "cpu"]), max_size=12))
def test_a_cleaned_map_says_the_same_in_fewer_words(device_map):
    cleaned = bigload.clean_device_map(dict(device_map))
    assert len(cleaned) <= len(device_map)
    assert {name: device_of(name, cleaned) for name in device_map} == device_map
    assert bigload.clean_device_map(dict(cleaned)) == cleaned


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
    with pytest.raises(DeviceMapError, match="torch cannot use it, it sees no") as caught:
        act(plan)
    assert "-m auto" in caught.value.hint
    assert caught.value.names


@pytest.mark.usefixtures("no_accelerator")
def test_the_message_names_the_device_and_what_goes_there():
    with pytest.raises(DeviceMapError) as caught:
        check_devices_present({"a": "cpu", "b": "cuda:1", "c": "disk", "d": "cuda:1", "": "cuda:1"})
    assert str(caught.value).startswith(
        "3 modules of the device map cannot go to cuda:1: torch cannot use it, it sees none of kind cuda"
    )
    assert caught.value.names == ("b", "d", "")
    with pytest.raises(DeviceMapError, match="accelerator 7: torch cannot use it, it sees no"):
        check_devices_present({"": 7})


def test_what_is_there_passes():
    check_devices_present({"a": "cpu", "b": "disk", "c": torch.device("cpu"), "d": "meta"})
