"""The planner for modules: cases worked out by hand. `tests/conformance/test_planner_functions.py` has random ones."""

import logging
import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bigload

BIG = 10**6


def holding(num_bytes, buffer_bytes=0):
    """Return a module with a weight and perhaps a buffer of so many bytes, on the meta device."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(num_bytes, dtype=torch.int8, device="meta"), requires_grad=False)
    if buffer_bytes:
        module.register_buffer("mask", torch.empty(buffer_bytes, dtype=torch.int8, device="meta"))
    return module


def parameter(num_bytes):
    return holding(num_bytes).weight


def row(*sizes):
    """Return modules a, b, c… of so many bytes."""
    return nn.ModuleDict({"abcdefgh"[index]: holding(size) for index, size in enumerate(sizes)})


class Block(nn.ModuleDict):
    """A class to keep whole."""


def linears():
    """Return six layers of 440 bytes, l0 to l5."""
    with torch.device("meta"):
        return nn.ModuleDict({f"l{index}": nn.Linear(10, 10) for index in range(6)})


def net():
    """Return layers of 64, 72 and 100 bytes, 80 of which are the weight of the last."""
    with torch.device("meta"):
        return nn.ModuleDict({"first": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "last": nn.Linear(4, 5)})


def infer(model, memory, *arguments, **options):
    """Return the device map, after checking that it covers the model, as a plain dict: order has tests of its own."""
    device_map = bigload.infer_auto_device_map(model, memory, *arguments, **options)
    bigload.check_device_map(model, device_map)
    return dict(device_map)


def insufficient(caplog):
    return [record.getMessage() for record in caplog.records if "insufficient memory" in record.getMessage()]


def test_the_first_accelerator_and_the_cpu_keep_room_for_the_largest_layer():
    device_map = infer(linears(), {0: 1000, 1: 1000, "cpu": BIG})
    assert device_map == {"l0": 0, "l1": 1, "l2": 1, "l3": "cpu", "l4": "cpu", "l5": "cpu"}


def test_a_layer_and_the_reserve_may_fill_a_device_to_the_last_byte():
    rest = {"l1": 1, "l2": 1, "l3": "cpu", "l4": "cpu", "l5": "cpu"}
    assert infer(linears(), {0: 880, 1: 1000, "cpu": BIG}) == {"l0": 0, **rest}


def test_a_device_too_small_for_anything_is_logged_with_what_it_lacks(caplog):
    with caplog.at_level(logging.INFO):
        device_map = infer(linears(), {0: 879, 1: 1000, "cpu": BIG})
    assert 0 not in device_map.values()
    [text] = insufficient(caplog)
    assert "0: 880 bytes required" in text


def test_no_reserve_is_kept_behind_the_last_layer():
    assert infer(linears(), {0: 2640}) == {"": 0}
    assert infer(linears(), {0: 2639, "cpu": BIG}) == {**{f"l{n}": 0 for n in range(4)}, "l4": "cpu", "l5": "cpu"}


def test_a_load_dtype_makes_room():
    assert set(infer(linears(), {0: 1000}, dtype=torch.float16)) == {"l0", "l1", "l2", "l3", "l4", "l5"}
    on_device = [name for name, device in infer(linears(), {0: 1000}, dtype="float16").items() if device == 0]
    assert on_device == ["l0", "l1", "l2"]


def test_beside_mps_the_cpu_keeps_no_room():
    assert infer(row(10, 20), {"mps": 25, "cpu": 20}) == {"a": "cpu", "b": "disk"}
    assert infer(row(10, 20), {0: 25, "cpu": 20}) == {"": "disk"}


def test_models_of_nothing_of_one_layer_and_of_one_child():
    assert infer(nn.Module(), {0: 10}) == {}
    assert infer(nn.Linear(2, 2), {0: 100}) == {"": 0}
    assert infer(nn.ModuleDict({"only": nn.Linear(2, 2)}), {0: 100}) == {"only": 0}


def test_devices_after_the_first_are_filled():
    expected = {"first": 0, "norm": 1, "last": 1}
    assert infer(net(), {0: 200, 1: 200}) == expected
    assert infer(net(), {0: 200, 1: 172, 2: 200}) == expected


def test_a_tied_weight_counts_once():
    model = net()
    model["first"].weight = model["last"].weight
    assert infer(model, {0: 200, 1: 200}) == {"": 0}


def test_a_module_is_split_at_its_layers_unless_its_class_stays_whole():
    model = nn.Sequential(Block(net()), Block(net()), Block(net()))
    split = {"0": 0, "1.first": 0, "1.norm": 0, "1.last": 1, "2": 1}
    assert infer(model, {0: 500, 1: 500}) == split
    for classes in ("Block", ["Block"], ("Block",), {"Block"}):
        assert infer(model, {0: 500, 1: 500}, classes) == {"0": 0, "1": 1, "2": 1}


def test_tied_layers_are_fetched_out_of_order():
    model = nn.ModuleDict({name: net() for name in ("one", "two", "three")})
    model["three"]["last"].weight = model["one"]["last"].weight
    expected = {"one": 0, "three.last": 0, "two": 1, "three.first": 1, "three.norm": 1}
    assert infer(model, {0: 400, 1: 500}) == expected
    model["two"]["last"].weight = model["one"]["last"].weight
    model["two"]["first"].weight = model["one"]["first"].weight
    rest = {"two.norm": 1, "three.first": 1, "three.norm": 1}
    assert infer(model, {0: 400, 1: 500}) == {"one": 0, "two.first": 0, "two.last": 0, "three.last": 0, **rest}


def test_layers_of_the_same_weights_go_together():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(6, 6), nn.Linear(4, 4), nn.Linear(6, 6))
    model[2].weight, model[2].bias = model[0].weight, model[0].bias
    assert infer(model, {0: 250, 1: 400}) == {"0": 0, "1": 1, "2": 0, "3": 1}


def test_what_is_tied_to_something_tied_goes_along():
    model = nn.Sequential(row(10, 10), row(10, 10), row(10, 10))
    model[1]["a"].weight = model[0]["a"].weight
    model[2]["b"].weight = model[1]["b"].weight
    model[0]._modules["c"] = holding(30)
    device_map = infer(model, {0: 99, "cpu": BIG}, ["ModuleDict"])
    assert len(set(device_map.values())) == 1


def test_buffers_of_offloaded_layers_that_fit_nowhere_are_warned_of():
    model = nn.ModuleDict({"a": holding(64, 80), "b": holding(72, 160), "c": holding(100, 120)})
    expected = {"a": 0, "b": "cpu", "c": "cpu"}
    with pytest.warns(UserWarning, match="Current model requires 280 bytes of buffers .* offload_buffers=True"):
        assert infer(model, {0: 400, "cpu": "1GB"}) == expected
    assert infer(model, {0: 400, "cpu": "1GB"}, offload_buffers=True) == expected
    assert infer(model, {0: 400, 1: 700, "cpu": "1GB"}) == {"a": 0, "b": 1, "c": 1}


def test_a_fallback_takes_a_later_layer_that_fits(caplog):
    model = nn.ModuleDict({"m": row(176, 80, 160)})
    with caplog.at_level(logging.INFO):
        assert infer(model, {0: 256}) == {"": "disk"}
        assert insufficient(caplog)
        caplog.clear()
        assert infer(model, {0: 256}, fallback_allocation=True) == {"m.a": "disk", "m.b": 0, "m.c": "disk"}
    assert not insufficient(caplog)


def test_a_fallback_that_finds_nothing_leaves_the_device_empty(caplog):
    with caplog.at_level(logging.INFO):
        assert set(infer(row(50, 40, 60), {0: 30}, fallback_allocation=True).values()) == {"disk"}
    assert insufficient(caplog)


def test_a_fallback_brings_what_is_tied_along():
    model = row(60, 30, 10, 8)
    assert infer(model, {0: 75}, fallback_allocation=True) == {"a": "disk", "b": "disk", "c": 0, "d": "disk"}
    model["d"].weight = model["c"].weight
    assert infer(model, {0: 75}, fallback_allocation=True) == {"a": "disk", "b": "disk", "c": 0, "d": 0}


def test_a_fallback_passes_over_a_layer_that_is_too_large_with_its_ties():
    model = row(60, 30, 10, 8)
    model["c"].weight = model["b"].weight
    assert infer(model, {0: 75}, fallback_allocation=True) == {"a": "disk", "b": "disk", "c": "disk", "d": 0}


def test_steps_are_told_on_request_and_printed_never(caplog, capsys):
    with caplog.at_level(logging.INFO):
        infer(row(10, 20), {0: 40, "cpu": 100})
        assert "goes to" not in caplog.text
        infer(row(10, 20), {0: 40, "cpu": 100}, verbose=True)
    assert "a (10 bytes with ties) goes to 0" in caplog.text
    assert capsys.readouterr().out == ""


def test_keys_come_in_the_order_of_the_model():
    device_map = bigload.infer_auto_device_map(row(10, 10, 10, 10), {0: 30, 1: 10, "cpu": BIG})
    assert list(device_map.items()) == [("a", 0), ("b", 0), ("c", 1), ("d", "cpu")]
    uncleaned = bigload.infer_auto_device_map(row(1, 2), {0: 30}, clean_result=False)
    assert list(uncleaned.items()) == [("a", 0), ("b", 0)]


# What accelerate 1.15 gets wrong.


def test_ties_are_not_torn_apart_by_another_that_comes_first():
    model = nn.ModuleDict({"one": row(10), "two": row(10, 4), "big": holding(30), "three": row(5), "four": row(10, 5)})
    model["last"] = holding(30)
    model["two"]["a"].weight = model["one"]["a"].weight
    model["four"]["a"].weight = model["two"]["b"].weight
    model["four"]["b"].weight = model["three"]["a"].weight
    device_map = infer(model, {0: 60, "cpu": BIG}, ["ModuleDict"])
    assert device_map == {"one": 0, "two": 0, "four": 0, "three": 0, "big": "cpu", "last": "cpu"}


def test_buffers_of_a_split_module_get_a_device():
    block = row(10, 10)
    block.register_buffer("mask", torch.empty(6, dtype=torch.int8, device="meta"))
    model = nn.Sequential(block, row(10, 10))
    device_map = infer(model, {0: 26, "cpu": BIG}, clean_result=False)
    assert device_map == {"0.a": 0, "0.b": "cpu", "0.mask": "cpu", "1": "cpu"}


def test_a_split_module_with_a_state_that_is_no_tensor_is_covered():
    class Counting(nn.ModuleDict):
        def get_extra_state(self):
            return 3

        def set_extra_state(self, state):
            """Take what get_extra_state() gave."""

    device_map = infer(nn.Sequential(Counting(row(10, 10)), row(10)), {0: 20, "cpu": BIG}, clean_result=False)
    assert set(device_map) == {"0.a", "0.b", "0._extra_state", "1"}


def test_a_limit_on_the_disk_holds():
    model = row(10, 20, 30)
    assert infer(model, {0: 15, "cpu": 0, "disk": 60}, clean_result=False) == dict.fromkeys("abc", "disk")
    with pytest.raises(bigload.DoesNotFitError, match="does not fit: it needs 60 B") as caught:
        infer(model, {0: 15, "cpu": 0, "disk": 59})
    assert caught.value.shortfalls == {"total": 30}


def test_a_disk_without_room_is_one_that_must_not_be_used():
    with pytest.raises(bigload.DoesNotFitError):
        infer(row(10), {0: 5, "disk": 0})


def test_a_parameter_tied_at_the_root_goes_where_its_partner_goes():
    model = row(10, 20, 9)
    model.register_parameter("scale", model["b"].weight)
    assert infer(model, {0: 30, 1: 19}) == {"scale": 0, "b": 0, "a": 1, "c": 1}


def test_a_parameter_that_a_split_block_owns_itself_may_be_tied():
    model = nn.Sequential(row(10, 20), row(10, 30))
    model[0].register_parameter("scale", model[1]["b"].weight)
    assert infer(model, {0: 60, "cpu": BIG}) == {"0.scale": 0, "1": 0, "0.a": "cpu", "0.b": "cpu"}


def test_two_names_in_one_module_for_one_parameter_are_both_covered():
    model = nn.Sequential(row(10, 20), row(10))
    model[0].register_parameter("one", parameter(5))
    model[0].register_parameter("two", model[0].one)
    device_map = infer(model, {0: 35, "cpu": BIG}, clean_result=False)
    assert device_map["0.one"] == device_map["0.two"] == 0


def test_a_module_that_stands_in_two_places_is_on_one_device():
    shared = holding(10)
    model = nn.Sequential(shared, holding(20), shared, holding(20))
    assert infer(model, {0: 30, "cpu": BIG}) == {"0": 0, "1": "cpu", "2": 0, "3": "cpu"}


def test_a_name_that_ends_in_anothers_is_another_module():
    model = nn.Sequential(*[holding(10) for _ in range(11)])
    model[10].weight = model[0].weight
    device_map = infer(model, {0: 20, 1: BIG})
    assert device_map["0"] == device_map["10"] == 0


def test_limits_may_be_floats():
    model = nn.ModuleDict({"m": row(176, 80, 160)})
    expected = {"m.a": "disk", "m.b": 0, "m.c": "disk"}
    assert infer(model, {0: 256.5}, fallback_allocation=True) == expected
    assert infer(model, {0: 416.0, "cpu": math.inf}) == {"m": 0}


def rows_of_layers(count):
    """Return layers that are each a little smaller than the last, so that the largest one left is always another."""
    return nn.ModuleDict({"layers": nn.Sequential(*[holding(count - index) for index in range(count)])})


def tied_layers(count):
    """Return layers of which each is tied to one far away."""
    layers = nn.Sequential(*[row(8, 4) for _ in range(count)])
    for index in range(count // 2):
        layers[index]["a"].weight = layers[count - 1 - index]["a"].weight
    return layers


def num_calls(function):
    """Count the calls and resumptions of functions in bigload, which tell of its work without a clock."""
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and "bigload" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("build", [rows_of_layers, tied_layers])
@pytest.mark.parametrize("fallback", [False, True])
@pytest.mark.sample(2)
def test_twice_the_layers_are_twice_the_work_not_four_times(build, fallback):
    def work(count):
        model = build(count)
        total = bigload.compute_module_sizes(model)[""]
        memory = {0: total // 4, 1: total // 4, 2: 10, "cpu": total // 4}
        return num_calls(lambda: bigload.infer_auto_device_map(model, memory, fallback_allocation=fallback))

    assert work(400) < 2.6 * work(200)


# Policies.


def repeated(count=4, block_bytes=20):
    """Return an embedding of 30 bytes, blocks of two layers, and a head of 10."""
    blocks = nn.ModuleList([row(block_bytes // 2, block_bytes - block_bytes // 2) for _ in range(count)])
    return nn.ModuleDict({"embed": holding(30), "layers": blocks, "head": holding(10)})


def test_a_policy_keeps_repeated_blocks_whole():
    device_map = infer(repeated(), {0: 75, 1: 75}, policy="sequential")
    assert device_map == {"embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "head": 1}


def test_balanced_evens_out_and_low_0_empties_the_first():
    balanced = infer(repeated(), {0: 200, 1: 200}, policy="balanced", clean_result=False)
    assert balanced == {"embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "head": 1}
    assert set(infer(repeated(), {0: 200, 1: 200}, policy="balanced_low_0").values()) == {1}


@pytest.mark.parametrize(
    "policy", sorted(set(bigload.Policy) - {bigload.Policy.STREAMED})
)  # which uses none for weights
def test_every_policy_answers_with_numbers_for_accelerators(policy):
    device_map = infer(repeated(), {0: 70, 3: 75, "cpu": 10}, policy=policy)
    assert set(device_map.values()) <= {0, 3, "cpu", "disk"}
    assert {type(device) for device in device_map.values() if device in (0, 3)} == {int}


def test_a_policy_streams_what_does_not_fit_and_the_disk_takes_the_rest():
    device_map = infer(repeated(), {0: 90, "cpu": 40}, policy="sequential")
    assert set(device_map.values()) == {0, "cpu", "disk"}


@pytest.mark.parametrize(("limits", "error"), [
    ({0: 10, "cpu": 20, "disk": 30}, bigload.DoesNotFitError),
    ({0: 70, "cpu": 20, "disk": 0}, bigload.DoesNotFitError),
    ({"disk": 500}, bigload.OptionError),
])  # fmt: skip
def test_a_policy_that_finds_no_room_says_so(limits, error):
    with pytest.raises(error):
        infer(repeated(), limits, policy="sequential")


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(bigload.OptionError, match="no policy 'best'") as caught:
        infer(repeated(), {0: 500}, policy="best")
    assert "sequential" in caught.value.hint


def test_a_model_that_is_to_be_tied_and_is_not_is_warned_of(caplog):
    class PreTrainedModel(nn.Module):
        def _tie_weights(self):
            """Tie something."""

    infer(PreTrainedModel(), {0: 10})
    assert "not tied" in caplog.text


sizes = st.lists(st.integers(0, 30), min_size=1, max_size=8)


@given(sizes, st.integers(0, 120), st.integers(0, 120), st.booleans(), st.data())
def test_no_limit_is_broken_and_ties_stay_together(sizes, first, second, fallback, data):
    model = nn.Sequential(*[row(size, size // 2) for size in sizes])
    ends = [data.draw(st.sampled_from([layer for block in model for layer in block.values()])) for _ in range(4)]
    ends[0].weight, ends[2].weight = ends[1].weight, ends[3].weight
    memory = {0: first, 1: second, "cpu": 50}
    device_map = infer(model, memory, clean_result=False, fallback_allocation=fallback)
    total = bigload.compute_module_sizes(model)
    for device, limit in memory.items():
        assert sum(total.get(name, 0) for name, home in device_map.items() if home == device) <= limit
    for group in bigload.find_tied_parameters(model):
        homes = {home for name, home in device_map.items() for tied in group if f"{tied}.".startswith(f"{name}.")}
        assert len(homes) == 1
