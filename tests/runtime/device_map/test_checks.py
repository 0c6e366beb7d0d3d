import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bigload


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
    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
