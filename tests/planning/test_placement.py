import pytest

from bigload.devices import Device
from bigload.planning.budget import MemoryBudget
from bigload.planning.placement import Placement, largest, workspace
from builders import units_of


def reserved(sizes, devices, budget, execution, *, in_flight=2):
    placement = Placement(
        devices=tuple(Device.parse(name) for name in devices),
        execution_device=Device.parse(execution),
        num_in_flight=in_flight,
    )
    needs = workspace(units_of(sizes), placement, MemoryBudget.of(budget))
    return {str(device): needed for device, needed in needs.items()}


EVERYTHING = {"cuda:0": 100, "cpu": 100}


def test_the_example_of_the_docstring():
    assert reserved([5, 4, 3], ["cpu", "cpu", "disk"], EVERYTHING, "cuda:0") == {"cuda:0": 9, "cpu": 3}


def test_what_lies_on_the_accelerator_needs_no_workspace():
    assert reserved([5, 4], ["cuda:0", "cuda:0"], EVERYTHING, "cuda:0") == {}


def test_the_execution_device_keeps_room_for_the_two_largest_of_ram_and_disk():
    assert reserved([5, 4, 3, 9], ["cpu", "disk", "disk", "cuda:0"], EVERYTHING, "cuda:0") == {"cuda:0": 9, "cpu": 7}


def test_one_streamed_unit_needs_room_for_one():
    assert reserved([5, 4], ["cuda:0", "cpu"], EVERYTHING, "cuda:0") == {"cuda:0": 4}


def test_ram_that_executes_keeps_room_for_what_comes_from_disk_only():
    assert reserved([5, 4, 3], ["cpu", "disk", "disk"], {"cpu": 100}, "cpu") == {"cpu": 7}


def test_a_budget_without_ram_reserves_nothing_there():
    assert reserved([5, 4], ["cuda:0", "disk"], {"cuda:0": 100}, "cuda:0") == {"cuda:0": 4}


def test_without_fetching_ahead_there_is_room_for_the_largest_alone():
    needs = reserved([5, 4, 3, 2], ["cpu", "cpu", "disk", "disk"], EVERYTHING, "cuda:0", in_flight=1)
    assert needs == {"cuda:0": 5, "cpu": 3}


@pytest.mark.parametrize(
    ("sizes", "count", "total"), [([], 2, 0), ([3], 2, 3), ([3, 1], 2, 4), ([1, 5, 3, 5], 2, 10), ([1, 5, 3, 5], 1, 5)]
)
def test_the_largest_are_summed(sizes, count, total):
    assert largest(sizes, count) == total
