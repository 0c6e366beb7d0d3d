import logging
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bigload
from bigload.runtime.device_map import device_memory

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """A function that gives this process accelerators with so many free bytes each, and 64 GiB of free RAM."""

    def has(kind, *free, is_integrated=False):
        def mem_get_info(number):
            if free[number] is None:
                raise RuntimeError("the device fell off the bus")
            return free[number], 10**12

        backend = SimpleNamespace(
            mem_get_info=mem_get_info,
            get_device_properties=lambda number: SimpleNamespace(is_integrated=is_integrated),
        )
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type=kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(free))
        monkeypatch.setattr(torch, "get_device_module", lambda name: backend if name == kind else None)

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    monkeypatch.setattr(device_memory, "available_memory", lambda: 64 * GIB)
    return has


def linear(*sizes):
    """Return layers of so many bytes each, on the meta device."""
    layers = [nn.Module() for _ in sizes]
    for layer, size in zip(layers, sizes, strict=True):
        weight = torch.empty(size, dtype=torch.int8, device="meta")
        layer.weight = nn.Parameter(weight, requires_grad=False)
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A class of blocks that are not all of one size."""

    def __init__(self, *sizes):
        super().__init__()
        self.layers = linear(*sizes)


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        ({"disk": "1TB", "cpu": "2GiB", 1: 500, 0: "1.5KB"}, {0: 1500, 1: 500, "cpu": 2 * GIB, "disk": 10**12}),
        ({"1": 10, "cuda:0": 20, "cpu": 1}, {0: 20, 1: 10, "cpu": 1}),
        ({0: 10.5, "cpu": math.inf}, {0: 10.5, "cpu": math.inf}),
    ],
    ids=["units", "texts", "floats"],
)
def test_sizes_become_bytes_and_devices_come_in_order(given, limits):
    assert list(bigload.get_max_memory(given).items()) == list(limits.items())


def test_the_callers_max_memory_is_not_changed():
    given = {0: "1KiB", 1: "1KiB", "cpu": "2KiB"}
    model = linear(10, 10)
    bigload.get_max_memory(given)
    bigload.get_balanced_memory(model, given)
    bigload.infer_auto_device_map(model, given)
    assert given == {0: "1KiB", 1: "1KiB", "cpu": "2KiB"}


@pytest.mark.parametrize("key", ["gpu", "", "disk:0", -1, None, 1.5, True], ids=str)
def test_an_unknown_device_is_refused(key):
    with pytest.raises(bigload.OptionError, match="is not recognized"):
        bigload.get_max_memory({key: 10})


@pytest.mark.parametrize("size", ["1gb", "12 parsecs", -5, -0.5, math.nan, True, None, [1]], ids=str)
def test_a_bad_size_is_refused_with_the_device_it_is_for(size):
    with pytest.raises(bigload.OptionError, match="max_memory 0="):
        bigload.get_max_memory({0: size})


def test_a_device_named_twice_is_refused():
    with pytest.raises(bigload.OptionError, match="two limits for device 0"):
        bigload.get_max_memory({0: 10, "0": 20})


def test_an_accelerator_that_is_not_there_is_logged(machine, caplog):
    machine("cuda", GIB)
    bigload.get_max_memory({0: 10, 3: 10})
    assert [record.getMessage() for record in caplog.records] == [
        "Device 3 is not available, available devices are [0]"
    ]


def test_without_limits_they_are_what_is_free(machine):
    assert bigload.get_max_memory() == {"cpu": 64 * GIB}
    machine("xpu", 10 * GIB, 20 * GIB)
    assert list(bigload.get_max_memory().items()) == [(0, 10 * GIB), (1, 20 * GIB), ("cpu", 64 * GIB)]


def test_memory_shared_with_the_host_counts_once(machine):
    machine("cuda", 10 * GIB, is_integrated=True)
    assert bigload.get_max_memory() == {0: 10 * GIB}
    machine("mps", GIB)
    assert bigload.get_max_memory() == {"mps": 64 * GIB}


def test_a_broken_accelerator_is_left_out_with_its_reason(machine, caplog):
    machine("cuda", None, GIB)
    assert bigload.get_max_memory() == {1: GIB, "cpu": 64 * GIB}
    assert "cuda:0 says nothing about its memory and is left out: the device fell off the bus" in caplog.text


def test_an_even_share_and_room_for_a_layer_on_all_but_the_last():
    model = linear(64, 72, 100)  # half is 118, the mean layer 78, and 1.25 of that 97
    assert bigload.get_balanced_memory(model, {0: 300, 1: 300}) == {0: 215, 1: 300}
    assert bigload.get_balanced_memory(model, {0: 200, 1: 200}) == {0: 200, 1: 200}
    assert bigload.get_balanced_memory(model, {0: 300, 1: 500, "cpu": 9}) == {0: 215, 1: 500, "cpu": 9}


def test_devices_without_memory_and_gaps_do_not_count():
    model = linear(64, 72, 100)
    assert bigload.get_balanced_memory(model, {0: 0, 1: 300, 2: 300}) == {0: 0, 1: 215, 2: 300}
    assert bigload.get_balanced_memory(model, {1: 300, 5: 300}) == {1: 215, 5: 300}
    assert bigload.get_balanced_memory(model, {0: 0, "cpu": 100}) == {0: 0, "cpu": 100}
    assert bigload.get_balanced_memory(model, {0: 300, "cpu": 1000}) == {0: 300, "cpu": 1000}


@pytest.mark.parametrize("classes", ["Block", ["Block"], {"Block"}, ("Block",)], ids=str)
def test_the_largest_block_of_a_class_is_the_block_size_not_the_first(classes):
    model = nn.Sequential(Block(10), Block(30, 50), Block(10))
    assert bigload.get_balanced_memory(model, {0: 300, 1: 300}, classes) == {0: 50 + 100, 1: 300}


def test_low_zero_leaves_to_device_0_what_the_others_cannot_hold():
    model = linear(*[10] * 10)
    assert bigload.get_balanced_memory(model, {0: 99, 1: 99, 2: 99}, low_zero=True) == {0: 0, 1: 62, 2: 99}
    assert bigload.get_balanced_memory(model, {0: 99, 1: 30, 2: 30}, low_zero=True) == {0: 40, 1: 30, 2: 30}
    assert bigload.get_balanced_memory(model, {0: 99, 2: 30, 7: 30}, low_zero=True) == {0: 40, 2: 30, 7: 30}


@pytest.mark.parametrize("others", [{0: 0}, {}], ids=["no memory", "not there"])
def test_low_zero_balances_the_others_where_device_0_has_nothing_to_keep_free(others):
    model = linear(*[10] * 10)
    limits = {**others, 1: 99, 2: 99}
    assert bigload.get_balanced_memory(model, limits, low_zero=True) == {**others, 1: 62, 2: 99}


def test_a_single_accelerator_nobody_set_a_limit_for_keeps_a_tenth_free(machine, caplog):
    machine("cuda", 1001)
    with caplog.at_level(logging.INFO):
        assert bigload.get_balanced_memory(linear(1)) == {0: 900, "cpu": 64 * GIB}
    assert "90%" in caplog.text
    assert bigload.get_balanced_memory(linear(1), {0: 1001}) == {0: 1001}
