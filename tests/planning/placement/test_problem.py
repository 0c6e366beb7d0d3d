import pytest

from bigload.devices import CPU, DISK, Device
from bigload.errors import OptionError
from bigload.planning.options import Bandwidth
from bigload.planning.placement.problem import Placement, device_loads, fetch_ahead, keeps_limits, workspace
from builders import problem_of, unit_of

CUDA0, CUDA1 = Device("cuda", 0), Device("cuda", 1)
EVERYTHING = {"cuda:0": 100, "cpu": 100}


def placed(devices, execution, *, in_flight=1):
    return Placement(
        devices=tuple(Device.parse(name) for name in devices),
        execution_device=Device.parse(execution),
        num_in_flight=in_flight,
    )


def reserved(units, devices, budget, execution, *, in_flight=1):
    needs = workspace(problem_of(units, budget), placed(devices, execution, in_flight=in_flight))
    return {str(device): needed for device, needed in needs.items()}


def test_the_example_of_the_docstring():
    homes = ["cpu", "cpu", "disk"]
    assert reserved([5, 4, 3], homes, EVERYTHING, "cuda:0", in_flight=2) == {"cuda:0": 10, "cpu": 6}


def test_what_lies_on_the_accelerator_needs_no_workspace():
    assert reserved([5, 4], ["cuda:0", "cuda:0"], EVERYTHING, "cuda:0") == {}


def test_the_execution_device_keeps_room_for_the_largest_of_ram_and_disk():
    homes = ["cpu", "disk", "disk", "cuda:0"]
    assert reserved([3, 5, 4, 9], homes, EVERYTHING, "cuda:0") == {"cuda:0": 5, "cpu": 5}
    assert reserved([5, 4, 3, 9], homes, EVERYTHING, "cuda:0") == {"cuda:0": 5, "cpu": 4}


def test_one_streamed_unit_needs_room_for_one():
    assert reserved([5, 4], ["cuda:0", "cpu"], EVERYTHING, "cuda:0") == {"cuda:0": 4}


def test_with_two_in_flight_there_are_two_buffers_of_the_same_size():
    assert reserved([5, 4], ["cuda:0", "cpu"], EVERYTHING, "cuda:0", in_flight=2) == {"cuda:0": 8}


def test_ram_that_executes_keeps_room_for_what_comes_from_disk_only():
    assert reserved([5, 4, 3], ["cpu", "disk", "disk"], {"cpu": 100}, "cpu") == {"cpu": 4}


def test_a_budget_without_ram_reserves_nothing_there():
    assert reserved([5, 4], ["cuda:0", "disk"], {"cuda:0": 100}, "cuda:0") == {"cuda:0": 4}


def test_a_unit_of_which_little_is_streamed_at_once_needs_little_workspace():
    assert reserved([unit_of(9, stream_bytes=2)], ["cpu"], EVERYTHING, "cuda:0") == {"cuda:0": 2}


def test_what_a_streamed_unit_needs_to_run_is_on_the_execution_device():
    asked = problem_of([unit_of(5, cache_bytes=3, logits_bytes=2)], EVERYTHING)
    loads = device_loads(asked, placed(["cpu"], "cuda:0"))
    assert (loads[CUDA0].cache, loads[CUDA0].logits, loads[CUDA0].workspace, loads[CUDA0].weights) == (3, 2, 5, 0)
    assert (loads[CPU].cache, loads[CPU].logits, loads[CPU].weights) == (0, 0, 5)


def test_what_a_unit_on_an_accelerator_needs_to_run_is_there():
    asked = problem_of([1, unit_of(5, cache_bytes=3)], {"cuda:0": 9, "cuda:1": 9})
    loads = device_loads(asked, placed(["cuda:0", "cuda:1"], "cuda:0"))
    assert (loads[CUDA0].cache, loads[CUDA1].cache) == (0, 3)


def test_a_device_that_runs_nothing_has_no_overhead():
    fixed = {CUDA0: 7, CUDA1: 7, CPU: 7}
    asked = problem_of([1, 1], {"cuda:0": 9, "cuda:1": 9, "cpu": 9}, fixed_bytes=fixed)
    loads = device_loads(asked, placed(["cuda:0", "cpu"], "cuda:0"))
    assert {device: load.fixed for device, load in loads.items()} == {CUDA0: 7, CUDA1: 0, CPU: 0, DISK: 0}


@pytest.mark.parametrize(("limit", "kept"), [(12, True), (11, False)])
def test_every_term_counts_against_the_limit(limit, kept):
    asked = problem_of(
        [1, unit_of(5, cache_bytes=3, logits_bytes=2)], {"cuda:0": limit, "cpu": 5}, fixed_bytes={CUDA0: 1}
    )
    assert keeps_limits(asked, placed(["cuda:0", "cpu"], "cuda:0")) is kept


@pytest.mark.parametrize(("cuda", "cpu", "in_flight"), [(8, 6, 2), (7, 6, 1), (8, 5, 1)])
def test_a_second_unit_is_fetched_ahead_where_every_device_has_room_for_it(cuda, cpu, in_flight):
    asked = problem_of([2, 3, 3], {"cuda:0": cuda, "cpu": cpu})
    assert fetch_ahead(asked, placed(["cuda:0", "disk", "disk"], "cuda:0")).num_in_flight == in_flight


@pytest.mark.parametrize(
    ("homes", "execution", "changes"),
    [
        (["cuda:0", "cuda:0", "cuda:1"], "cuda:0", 1),
        (["cuda:0", "cpu", "disk", "cuda:0"], "cuda:0", 0),
        (["cuda:0", "cuda:1", "cpu", "cuda:1"], "cuda:0", 3),
        (["cpu", "disk"], "cpu", 0),
        ([], "cpu", 0),
    ],
)
def test_streamed_units_change_devices_where_they_run_and_not_where_they_live(homes, execution, changes):
    assert placed(homes, execution).num_device_changes == changes


@pytest.mark.parametrize(("disk", "link"), [(0, 1), (-1, 1), (2, 1), (0, 0)])
def test_bandwidths_that_make_no_sense_are_refused(disk, link):
    with pytest.raises(OptionError, match="make no sense"):
        Bandwidth(disk=disk, link=link)


def test_a_disk_may_be_as_fast_as_the_link():
    assert Bandwidth(disk=5, link=5).disk == 5


def test_a_device_that_cannot_even_hold_its_overhead_has_less_room_than_none():
    asked = problem_of([1], {"cuda:0": 5, "cpu": 4}, fixed_bytes={CUDA0: 7})
    assert asked.accelerators == [(CUDA0, -2)]
    assert (asked.room(CPU), asked.room(DISK)) == (4, None)
