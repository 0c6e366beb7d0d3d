"""Device maps of a model, in every form of their keys."""

import pytest
import torch
from torch import nn

from bigload.runtime.device_map.blocks import DeviceMapBlock, blocks_of, device_of, main_device_of


class Split(nn.Module):
    """A module that owns a parameter and has two others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def test_keys_that_do_not_lie_in_each_other_are_the_blocks():
    assert blocks_of(Split(), {"first": 0, "second": "disk", "scale": 0}) == (
        DeviceMapBlock(name="", devices=(0,), is_whole=False),
        DeviceMapBlock(name="first", devices=(0,)),
        DeviceMapBlock(name="second", devices=("disk",)),
    )


def test_one_key_for_the_model_is_one_block():
    assert blocks_of(Split(), {"": "disk"}) == (DeviceMapBlock(name="", devices=("disk",)),)


def test_what_a_map_says_of_a_module_holds_for_all_inside_that_it_does_not_name():
    assert blocks_of(Split(), {"": "cpu", "second.2": 1}) == (
        DeviceMapBlock(name="", devices=("cpu",), is_whole=False),
        DeviceMapBlock(name="first", devices=("cpu",)),
        DeviceMapBlock(name="second.0", devices=("cpu",)),
        DeviceMapBlock(name="second.1", devices=("cpu",)),
        DeviceMapBlock(name="second.2", devices=(1,)),
    )


def test_the_main_device_does_not_depend_on_the_order_of_a_set():
    assert main_device_of({"a": "cpu", "b": "cuda:1", "c": "cuda:0", "d": "disk"}) == "cuda:1"
    assert main_device_of({"a": "disk", "b": torch.device("cpu")}) == "cpu"


def test_a_tensor_lives_on_the_device_of_the_innermost_key_around_it():
    device_map = {"": "cpu", "second": 0, "second.2": 1}
    assert [device_of(name, device_map) for name in ("scale", "second.0.bias", "second.2.bias")] == ["cpu", 0, 1]


@pytest.mark.parametrize(("main", "expected"), [("cpu", [False, True]), ("cuda:0", [True, True])])
def test_modules_in_ram_are_offloaded_unless_they_run_there(main, expected):
    blocks = blocks_of(Split(), {"scale": main, "first": "cpu", "second": "disk"})
    assert [block.is_offloaded(main) for block in blocks if block.is_whole] == expected
    assert [block.runs_on(main) for block in blocks] == [main] * 3
