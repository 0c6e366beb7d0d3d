import pytest

from bigload.planning.budget import MemoryBudget
from bigload.planning.choices import Policy
from bigload.planning.placement import Misfit, Placement
from bigload.planning.policies.registry import POLICIES
from bigload.planning.policies.sequential import place_sequentially
from builders import units_of


def place(sizes, *, use_disk=True, **limits):
    named = {name.replace("_", ":"): limit for name, limit in limits.items()}
    return place_sequentially(units_of(sizes), MemoryBudget.of(named, use_disk=use_disk))


def devices_of(sizes, **limits):
    placement = place(sizes, **limits)
    assert isinstance(placement, Placement), placement
    return [str(device) for device in placement.devices]


@pytest.mark.parametrize(
    ("limits", "devices"),
    [
        ({"cuda_0": 6}, ["cuda:0"] * 3),
        ({"cuda_0": 5, "cpu": 6}, ["cpu"] * 3),
        ({"cuda_0": 5, "cpu": 5}, ["disk"] * 3),
    ],
)
def test_the_examples_of_the_docstring(limits, devices):
    assert devices_of([2, 2, 2], **limits) == devices


def test_what_fits_exactly_needs_no_workspace():
    assert devices_of([4, 3, 3], cuda_0=10) == ["cuda:0"] * 3


def test_one_byte_less_streams_and_pays_for_the_workspace():
    # One unit of 3 left over takes 3: 6 remain, 4 fits and 4 + 3 does not. Two left over take 6: 3 remain, 4 does not
    # fit any more. Three left over take 7.
    assert devices_of([4, 3, 3], cuda_0=9) == ["disk"] * 3


def test_what_is_left_over_grows_with_the_workspace_it_needs():
    # One block of 2 left over takes 2, so two are left over, which take 4: 3 of 7 remain, room for one block.
    assert devices_of([2, 2, 2, 2], cuda_0=7, cpu=100) == ["cuda:0", "cpu", "cpu", "cpu"]


def test_accelerators_are_filled_in_the_order_of_the_budget():
    assert devices_of([2, 2, 2], cuda_1=4, cuda_0=2) == ["cuda:1", "cuda:1", "cuda:0"]


def test_a_device_that_was_left_is_not_gone_back_to():
    assert devices_of([2, 5, 1], cuda_0=4, cuda_1=100) == ["cuda:0", "cuda:1", "cuda:1"]


def test_what_the_accelerators_cannot_hold_goes_to_ram_and_then_to_disk():
    # cuda:0 keeps 4 of 8 for streaming, RAM 4 of 7 for what comes from disk.
    assert devices_of([2] * 6, cuda_0=8, cpu=7) == ["cuda:0", "cuda:0", "cpu", "disk", "disk", "disk"]


def test_what_ram_can_hold_does_not_go_to_disk():
    assert devices_of([2] * 6, cuda_0=8, cpu=8) == ["cuda:0", "cuda:0", "cpu", "cpu", "cpu", "cpu"]


def test_ram_alone_runs_in_place_and_needs_no_workspace():
    assert devices_of([3, 3], cpu=6) == ["cpu", "cpu"]


def test_ram_alone_keeps_room_for_what_comes_from_disk():
    assert devices_of([3, 3, 3, 3], cpu=9) == ["cpu", "disk", "disk", "disk"]


def test_without_ram_the_rest_goes_to_disk():
    assert devices_of([2, 2, 2, 2], cuda_0=6) == ["cuda:0", "disk", "disk", "disk"]


def test_offloaded_units_run_on_the_device_of_the_first_unit():
    assert str(place([2, 2, 2, 2], cuda_1=6, cpu=100).execution_device) == "cuda:1"


def test_without_an_accelerator_units_run_in_ram():
    assert str(place([2], cpu=6).execution_device) == "cpu"


def test_an_accelerator_that_holds_nothing_is_not_the_one_that_streams():
    placement = place([5, 1], cuda_0=4, cuda_1=6, cpu=6)
    assert [str(device) for device in placement.devices] == ["cuda:1", "cuda:1"]
    assert str(placement.execution_device) == "cuda:1"


def test_no_units_fit_anywhere():
    assert devices_of([], cuda_0=1) == []


def test_empty_units_take_no_room():
    assert devices_of([0, 0, 1], cuda_0=1, use_disk=False) == ["cuda:0"] * 3


def test_bytes_that_find_no_device_are_counted():
    misfit = place([2, 2, 2, 2], cpu=5, use_disk=False)
    assert isinstance(misfit, Misfit)
    assert (misfit.unplaced_bytes, dict(misfit.workspace), dict(misfit.too_small)) == (4, {}, {})


def test_the_workspace_of_a_failed_try_is_told():
    misfit = place([2, 2, 2, 2], cuda_0=6, use_disk=False)
    assert {str(device): needed for device, needed in misfit.workspace.items()} == {"cuda:0": 2}
    assert (misfit.unplaced_bytes, misfit.host_bytes) == (4, 4)


def test_with_room_for_one_streamed_unit_none_is_fetched_ahead():
    placement = place([2, 2, 2], cuda_0=3)
    assert placement.num_in_flight == 1
    assert [str(device) for device in placement.devices] == ["disk"] * 3


def test_with_room_for_two_streamed_units_one_is_fetched_ahead():
    assert place([2, 2, 2], cuda_0=4).num_in_flight == 2


def test_a_device_too_small_for_the_workspace_is_named_with_what_it_lacks():
    misfit = place([3, 3, 3], cuda_0=2)
    assert {str(device): lacking for device, lacking in misfit.too_small.items()} == {"cuda:0": 1}


def test_a_device_fits_when_it_gets_what_it_was_said_to_lack():
    misfit = place([2, 3, 1], cuda_0=2)
    (lacking,) = misfit.too_small.values()
    assert isinstance(place([2, 3, 1], cuda_0=2 + lacking), Placement)


def test_a_device_beside_another_fits_when_it_gets_what_it_was_said_to_lack():
    misfit = place([1, 2, 2], cuda_0=1, cuda_1=1)
    (lacking,) = misfit.too_small.values()
    assert isinstance(place([1, 2, 2], cuda_0=1 + lacking, cuda_1=1), Placement)


def test_ram_that_holds_what_the_accelerators_do_not_is_enough_beside_a_limited_disk():
    misfit = place([1, 1, 1], cuda_0=2, disk=1)
    assert isinstance(misfit, Misfit)
    assert isinstance(place([1, 1, 1], cuda_0=2, disk=1, cpu=misfit.host_bytes), Placement)


def test_a_limited_disk_is_filled_no_further_than_its_limit():
    misfit = place([4, 4, 4], cpu=8, disk=3)
    assert misfit.unplaced_bytes > 0


def test_every_policy_has_a_function():
    assert set(POLICIES) == set(Policy)
