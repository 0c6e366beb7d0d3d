"""Weights in memory once: seen by all, written to by each for itself, gone with the last who uses them."""

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from bigload.parallel.workers.shared_weights import memory_file, share_weights


def shared(tensors):
    """Share `tensors`, and return what another process would see."""
    with memory_file("bigload-weights") as descriptor:
        weights = share_weights(descriptor, dict(enumerate(tensors)))
        return replace(weights, descriptor=os.dup(descriptor)).tensors()


def maps():
    return sum("bigload-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_both_sides_see_the_values():
    values = [
        torch.randn(3, 5),
        torch.arange(7),
        torch.tensor(2.5),
        torch.empty(0, 4),
        torch.ones(2).to(torch.bfloat16),
    ]
    expected = [value.clone() for value in values]
    found = shared(values)
    for number, value in enumerate(expected):
        assert torch.equal(found[number], value)
        assert torch.equal(values[number], value)
        assert found[number].dtype == value.dtype


def test_who_writes_does_so_for_itself():
    value = torch.zeros(2000)
    found = shared([value])[0]
    value.add_(1)
    assert found.sum() == 0
    found.sub_(1)
    assert value.sum() == 2000


def test_parameters_stay_the_same_objects_and_tensors_of_one_storage_go_on_sharing_it():
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    row, flipped = weight.data[1], weight.data.T
    found = shared([weight, row, flipped])
    assert isinstance(weight, nn.Parameter)
    with torch.no_grad():
        weight[1, 2] = 9
    assert row[2] == flipped[2, 1] == 9
    found[0][1, 0] = 7
    assert found[1][0] == found[2][0, 1] == 7
    assert found[2].stride() == (1, 3)


def test_nothing_at_all_can_be_shared():
    assert shared([]) == {}


def test_a_map_ends_with_the_last_tensor_and_keeps_no_descriptor():
    before, descriptors = maps(), num_descriptors()
    value = torch.ones(1000)
    found = shared([value])
    assert maps() > before
    assert num_descriptors() == descriptors
    del found
    row = value[:3]
    del value
    gc.collect()
    assert maps() == before + 1
    assert row.sum() == 3
    del row
    gc.collect()
    assert maps() == before


def test_no_descriptor_is_left_where_sharing_fails():
    with memory_file("bigload-weights") as descriptor:
        pass
    descriptors = num_descriptors()
    with pytest.raises(OSError, match="Bad file descriptor"):
        share_weights(descriptor, {0: torch.ones(3)})
    assert num_descriptors() == descriptors
