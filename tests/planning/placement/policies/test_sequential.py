import pytest

from bigload.devices import CPU, Device
from bigload.planning.choices import Policy
from bigload.planning.placement.policies.sequential import place_sequentially, place_streamed
from bigload.planning.placement.problem import Misfit, Placement, keeps_limits
from bigload.planning.placement.solve import solve
from builders import problem_of, unit_of

CUDA0 = Device("cuda", 0)


def asked(sizes, *, use_disk=True, wishes=None, **limits):
    named = {name.replace("_", ":"): limit for name, limit in limits.items()}
    return problem_of(sizes, named, use_disk=use_disk, **(wishes or {}))


def place(sizes, **limits):
    return place_sequentially(asked(sizes, **limits))


FOUR = [2, 2, 2, 2]
TWO_IN_FLIGHT = {"num_in_flight": 2}
CACHED = [unit_of(2, cache_bytes=1)] * 4


@pytest.mark.parametrize(
    ("sizes", "limits", "devices"),
    [
        pytest.param(FOUR, {"cuda_0": 8}, "cuda:0 cuda:0 cuda:0 cuda:0", id="first example of the docstring"),
        pytest.param(FOUR, {"cuda_0": 5, "cpu": 6}, "cuda:0 cpu cpu cpu", id="second example"),
        pytest.param(FOUR, {"cuda_0": 5, "cpu": 5}, "cuda:0 cpu disk disk", id="third example"),
        pytest.param([4, 3, 3], {"cuda_0": 10}, "cuda:0 cuda:0 cuda:0", id="what fits exactly needs no workspace"),
        # The last unit of 3 is left over and takes 3: 6 remain, 4 fits and 4 + 3 does not. Two of 3 still take 3.
        pytest.param([4, 3, 3], {"cuda_0": 9}, "cuda:0 disk disk", id="one byte less pays for the workspace"),
        # The 1 left over takes 1, which leaves 5 of 6: the 3 is left over too and takes 3; then so does the 2.
        pytest.param([2, 3, 1], {"cuda_0": 5, "cpu": 100}, "cuda:0 cpu cpu", id="a workspace grows what is left over"),
        # Two buffers of 2 leave room for one block of 7; with one buffer it is two.
        pytest.param(
            FOUR, {"cuda_0": 7, "cpu": 100, "wishes": TWO_IN_FLIGHT}, "cuda:0 cpu cpu cpu", id="two in flight"
        ),
        pytest.param(FOUR, {"cuda_0": 7, "cpu": 100}, "cuda:0 cuda:0 cpu cpu", id="one in flight"),
        pytest.param([2, 2, 2], {"cuda_1": 4, "cuda_0": 2}, "cuda:1 cuda:1 cuda:0", id="in the order of the budget"),
        pytest.param(
            [2, 5, 1], {"cuda_0": 4, "cuda_1": 100}, "cuda:0 cuda:1 cuda:1", id="a device is never returned to"
        ),
        # cuda:0 keeps 2 of 6 for streaming, RAM 2 of 5 for what comes from disk.
        pytest.param([2] * 6, {"cuda_0": 6, "cpu": 5}, "cuda:0 cuda:0 cpu disk disk disk", id="RAM, then disk"),
        pytest.param([2] * 6, {"cuda_0": 6, "cpu": 8}, "cuda:0 cuda:0 cpu cpu cpu cpu", id="RAM holds the rest"),
        pytest.param([3, 3], {"cpu": 6}, "cpu cpu", id="RAM alone runs in place and needs no workspace"),
        pytest.param([3] * 4, {"cpu": 9}, "cpu cpu disk disk", id="RAM alone keeps room for what comes from disk"),
        pytest.param([3] * 4, {"cpu": 9, "wishes": TWO_IN_FLIGHT}, "cpu disk disk disk", id="RAM alone, two in flight"),
        pytest.param(FOUR, {"cuda_0": 5}, "cuda:0 disk disk disk", id="without RAM the rest goes to disk"),
        pytest.param([], {"cuda_0": 1}, "", id="no units fit anywhere"),
        pytest.param(
            [0, 0, 1], {"cuda_0": 1, "use_disk": False}, "cuda:0 cuda:0 cuda:0", id="empty units take no room"
        ),
        # 2 of weights and 1 of cache each: two find room on cuda:0 beside one buffer and the caches of the other two.
        pytest.param(CACHED, {"cuda_0": 10, "cpu": 100}, "cuda:0 cuda:0 cpu cpu", id="caches of streamed units"),
        pytest.param(CACHED, {"cuda_0": 9, "cpu": 100}, "cuda:0 cpu cpu cpu", id="caches with a byte less"),
        pytest.param(
            [2, 2, 2],
            {"cuda_0": 6, "cpu": 100, "wishes": {"fixed_bytes": {CUDA0: 1}}},
            "cuda:0 cpu cpu",
            id="overhead leaves less room for weights",
        ),
    ],
)
def test_devices_are_filled_in_order_beside_a_workspace(sizes, limits, devices):
    placement = place(sizes, **limits)
    assert isinstance(placement, Placement), placement
    assert " ".join(map(str, placement.devices)) == devices


def test_offloaded_units_run_on_the_device_of_the_first_unit():
    assert str(place([2, 2, 2, 2], cuda_1=6, cpu=100).execution_device) == "cuda:1"


def test_without_an_accelerator_units_run_in_ram():
    assert str(place([2], cpu=6).execution_device) == "cpu"


def test_an_accelerator_that_holds_nothing_is_not_the_one_that_streams():
    placement = place([5, 1], cuda_0=4, cuda_1=6, cpu=6)
    assert [str(device) for device in placement.devices] == ["cuda:1", "cuda:1"]
    assert str(placement.execution_device) == "cuda:1"


def test_bytes_that_find_no_device_are_counted():
    misfit = place([2, 2, 2, 2], cpu=5, use_disk=False)
    assert isinstance(misfit, Misfit)
    assert (misfit.unplaced_bytes, dict(misfit.workspace), dict(misfit.too_small)) == (4, {}, {})


def test_the_workspace_of_a_failed_try_is_told():
    misfit = place([2, 2, 2, 2], cuda_0=6, use_disk=False)
    assert {str(device): needed for device, needed in misfit.workspace.items()} == {"cuda:0": 2}
    assert (misfit.unplaced_bytes, misfit.host_bytes) == (4, 4)


@pytest.mark.parametrize(("limit", "in_flight"), [(7, 1), (8, 2)])
def test_a_second_streamed_unit_is_fetched_ahead_where_there_is_room_for_it(limit, in_flight):
    # The block of 7 does not fit beside the first one, so cuda:0 has room left over.
    found = solve(asked([2, 7, 3, 3], cuda_0=limit, cuda_1=7, cpu=100), Policy.SEQUENTIAL)
    assert list(map(str, found.placement.devices)) == ["cuda:0", "cuda:1", "cpu", "cpu"]
    assert found.placement.num_in_flight == in_flight


def test_room_for_a_second_in_flight_is_kept_where_it_is_asked_for():
    assert isinstance(place([2, 2, 2], cuda_0=3, wishes={"num_in_flight": 2}), Misfit)
    assert isinstance(place([2, 2, 2], cuda_0=3), Placement)


def test_a_device_with_room_for_the_buffer_and_not_for_the_caches_is_too_small():
    misfit = place([unit_of(2, cache_bytes=1)] * 4, cuda_0=5, cpu=100)
    assert dict(misfit.too_small) == {CUDA0: 1}


def test_ram_that_runs_the_model_holds_its_caches_and_overhead():
    blocks = [unit_of(2, cache_bytes=1)] * 2
    assert place(blocks, cpu=7, wishes={"fixed_bytes": {CPU: 1}}).devices == (CPU, CPU)
    assert isinstance(place(blocks, cpu=6, use_disk=False, wishes={"fixed_bytes": {CPU: 1}}), Misfit)


def test_a_device_too_small_for_the_workspace_is_named_with_what_it_lacks():
    misfit = place([3, 3, 3], cuda_0=2)
    assert {str(device): lacking for device, lacking in misfit.too_small.items()} == {"cuda:0": 1}


@pytest.mark.parametrize(("sizes", "limits"), [([2, 3, 1], {"cuda_0": 2}), ([1, 2, 2], {"cuda_0": 1, "cuda_1": 1})])
def test_a_device_fits_when_it_gets_what_it_was_said_to_lack(sizes, limits):
    (lacking,) = place(sizes, **limits).too_small.values()
    assert isinstance(place(sizes, **{**limits, "cuda_0": limits["cuda_0"] + lacking}), Placement)


def test_ram_that_holds_what_the_accelerators_do_not_is_enough_beside_a_limited_disk():
    misfit = place([1, 1, 1], cuda_0=2, disk=1)
    assert isinstance(misfit, Misfit)
    assert isinstance(place([1, 1, 1], cuda_0=2, disk=1, cpu=misfit.host_bytes), Placement)


def test_a_limited_disk_is_filled_no_further_than_its_limit():
    misfit = place([4, 4, 4], cpu=8, disk=3)
    assert misfit.unplaced_bytes > 0


@pytest.mark.parametrize("policy", sorted({*Policy} - {Policy.STREAMED}))
def test_when_nothing_can_be_streamed_through_an_accelerator_ram_runs_the_model(policy):
    found = solve(asked([4, 4, 4], cuda_0=3, cpu=12), policy)
    assert set(found.placement.devices) == {CPU}
    assert found.placement.execution_device == CPU
    assert not found.problem.budget.accelerators


@pytest.mark.parametrize("policy", Policy)
def test_ram_runs_the_model_only_when_it_can(policy):
    assert isinstance(solve(asked([4, 4, 4], cuda_0=3, cpu=11, use_disk=False), policy), Misfit)
    assert isinstance(solve(asked([4, 4, 4], cuda_0=3), policy), Misfit)


@pytest.mark.parametrize("policy", Policy)
def test_what_a_policy_finds_keeps_every_limit(policy):
    for cuda in range(1, 16):
        for cpu in range(1, 16):
            found = solve(asked([3, 1, 2, 3, 2], cuda_0=cuda, cpu=cpu), policy)
            assert isinstance(found, Misfit) or keeps_limits(found.problem, found.placement)


@pytest.mark.parametrize(
    ("sizes", "limits", "devices", "execution"),
    [
        pytest.param(FOUR, {"cuda_0": 100, "cpu": 100}, "cpu cpu cpu cpu", "cuda:0", id="nothing stays on a card"),
        pytest.param(FOUR, {"cuda_0": 2, "cpu": 100}, "cpu cpu cpu cpu", "cuda:0", id="a card of one unit is enough"),
        pytest.param(FOUR, {"cuda_0": 1, "cuda_1": 2, "cpu": 100}, "cpu cpu cpu cpu", "cuda:1", id="a card that does"),
        pytest.param(FOUR, {"cuda_0": 2, "cpu": 5}, "cpu disk disk disk", "cuda:0", id="then the disk"),
        pytest.param(FOUR, {"cpu": 8}, "cpu cpu cpu cpu", "cpu", id="without cards RAM runs it"),
    ],
)
def test_streamed_units_stay_off_the_cards(sizes, limits, devices, execution):
    problem = asked(sizes, **limits)
    placed = place_streamed(problem)
    assert isinstance(placed, Placement)
    assert (" ".join(map(str, placed.devices)), str(placed.execution_device)) == (devices, execution)
    assert keeps_limits(problem, placed)
    assert solve(problem, Policy.STREAMED).placement.num_in_flight == 1


def test_a_card_too_small_for_what_is_streamed_is_a_misfit_though_ram_would_do():
    problem = asked([2, 5, 2], cuda_0=4, cpu=100)
    assert solve(problem, Policy.STREAMED) == Misfit(too_small={CUDA0: 1})
    assert solve(problem, Policy.OPTIMAL).placement.execution_device == CPU
