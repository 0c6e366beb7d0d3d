from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bigload.devices import CPU, DISK
from bigload.errors import OptionError
from bigload.machine.profiles.machine_profile import NARROW_ROW, WIDE_ROW, DeviceProfile, MachineProfile
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.options import options_of
from bigload.planning.planner import plan_details
from bigload.planning.timing.predict import matching_seconds, predict, with_bandwidth
from builders import checkpoint_of, llama_config, llama_tensors

BLOCK, EMBEDDING, NORM = 1040, 512, 16
MATRICES = 4 * 6 + 1
FAST = 10**9
CPU_PROFILE = DeviceProfile(
    device="cpu", name="slow", weight_rate={"BF16": 1000}, flops={"BF16": FAST}, launch_seconds=0.01
)
GPU_PROFILE = DeviceProfile(
    device="cuda",
    name="fast",
    weight_rate={"BF16": 10_000},
    flops={"BF16": FAST},
    launch_seconds=0.001,
    link_in=500,
    link_out=500,
)
MACHINE = MachineProfile(
    name="small",
    source="file",
    disk_rate=100,
    mapped_rate=None,
    load_rate=1000,
    ram_bytes=None,
    devices=(CPU_PROFILE, GPU_PROFILE),
)
RATES = st.integers(10, 10**5)
LIMITS = st.sampled_from(
    [{"cpu": 10_000}, {"cpu": 3000}, {"cuda:0": 3000, "cpu": 10_000}, {"cuda:0": 3000, "cpu": 2200}, {"cuda:0": 9000}]
)


def details_of(max_memory, *, tensors=None, config=None, **keywords):
    checkpoint = checkpoint_of(tensors or llama_tensors(), config=config or llama_config())
    return plan_details(checkpoint, MemoryBudget.of(max_memory), options_of(overhead=0, **keywords))


def predicted(max_memory, machine=MACHINE, *, ram_bytes=None, **keywords):
    details = details_of(max_memory, **keywords)
    return predict(details.plan, details.structure, machine, ram_bytes=ram_bytes)


def test_in_ram_a_token_takes_as_long_as_memory_gives_the_weights():
    found = predicted({"cpu": 10_000})
    assert found.token_seconds == pytest.approx((4 * BLOCK + NORM + EMBEDDING) / 1000 + MATRICES / 7 * 0.01)
    assert found.bound_by == "memory"
    assert {step.lane for step in found.steps} == {"cpu"}
    assert found.load_seconds == (4 * BLOCK + NORM + 2 * EMBEDDING) / 100


def test_a_load_matches_tensors_before_it_reads_them_at_the_rate_of_cold_files():
    machine = replace(MACHINE, cold_load_rate=50, matching_seconds=0.5, tensor_seconds=0.01)
    found = predicted({"cpu": 10_000}, machine)
    assert found.load_seconds == pytest.approx(0.5 + 31 * 0.01 + (4 * BLOCK + NORM + 2 * EMBEDDING) / 50)


def test_memory_that_a_host_has_taken_back_is_touched_by_loads_and_by_the_first_token():
    machine = replace(MACHINE, fresh_memory_rate=200)
    for limit, touched in (({"cpu": 10_000}, "load_seconds"), ({"cpu": 3000}, "first_token_seconds")):
        before, found = predicted(limit), predicted(limit, machine)
        assert getattr(found, touched) > getattr(before, touched)
        assert found.token_seconds == before.token_seconds
    in_ram = 4 * BLOCK + NORM + 2 * EMBEDDING
    assert predicted({"cpu": 10_000}, machine).load_seconds == pytest.approx(in_ram / 100 + in_ram / 200)


def test_from_disk_every_token_reads_what_no_memory_keeps():
    details = details_of({"cpu": 3000})
    found = predict(details.plan, details.structure, MACHINE, ram_bytes=0)
    assert found.bound_by == "disk"
    computing = sum(step.seconds for step in found.steps if step.lane == "cpu")
    assert found.token_seconds == pytest.approx(details.plan.weights_on(DISK) / 100 + computing)  # no room to prefetch


def test_pages_that_fit_into_free_memory_are_read_once():
    details = details_of({"cpu": 3000})
    found = predict(details.plan, details.structure, MACHINE, ram_bytes=10**6)
    assert {step.lane for step in found.steps} == {"cpu"}
    assert found.first_token_seconds > details.plan.weights_on(DISK) / 100 > found.token_seconds


def test_an_accelerator_takes_from_the_link_what_it_does_not_hold():
    details = details_of({"cuda:0": 3000, "cpu": 10_000})
    found = predict(details.plan, details.structure, MACHINE)
    assert found.bound_by == "link"
    assert found.token_seconds == pytest.approx(details.plan.weights_on(CPU) / 500, rel=0.3)


def test_an_encoder_runs_for_the_prompt_only():
    names = [f"{side}.block.{number}.layer.0.w" for side in ("encoder", "decoder") for number in range(2)]
    tensors = {name: ("BF16", [10, 10]) for name in names}
    found = predicted({"cpu": 10_000}, tensors=tensors, config={"is_encoder_decoder": True, "model_type": "t5"})
    assert found.token_seconds == pytest.approx(2 * 200 / 1000 + 2 / 7 * 0.01)


@pytest.mark.parametrize(
    ("cross", "is_needed"), [("EncDecAttention.k", 0), ("EncDecAttention.q", 1), ("Attention.k", 1)]
)
def test_keys_and_values_of_an_encoder_s_output_are_made_for_the_first_token_only(cross, is_needed):
    names = ["encoder.block.0.layer.0.w", "decoder.block.0.layer.0.w", f"decoder.block.0.layer.1.{cross}.weight"]
    tensors = {name: ("BF16", [10, 10]) for name in names}
    found = predicted({"cpu": 10_000}, tensors=tensors, config={"is_encoder_decoder": True, "model_type": "t5"})
    one = 200 / 1000 + 1 / 7 * 0.01
    assert found.first_token_seconds == pytest.approx(3 * one, rel=0.2)  # the encoder reads a prompt
    assert found.token_seconds == pytest.approx((1 + is_needed) * one)


def test_tensors_of_single_experts_have_a_figure_of_their_own():
    tensors = {f"layers.0.mlp.experts.{number}.w": ("BF16", [10, 10]) for number in range(8)}
    details = details_of({"cpu": 10**6}, tensors=tensors | {"layers.0.mlp.gate.weight": ("BF16", [8, 10])}, config={})
    machine = replace(MACHINE, matching_seconds=0.5, tensor_seconds=0.1, expert_tensor_seconds=0.01)
    assert matching_seconds(machine, details.structure) == pytest.approx(0.5 + 0.1 + 8 * 0.01)


def test_a_token_reads_the_experts_that_it_chooses():
    config = {"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8}
    tensors = {f"layers.0.mlp.experts.{number}.w": ("BF16", [10, 10]) for number in range(8)}
    tensors |= {"layers.0.attn.w": ("BF16", [10, 10]), "layers.1.attn.w": ("BF16", [10, 10])}
    found = predicted({"cpu": 10_000}, tensors=tensors, config=config)
    assert found.token_seconds == pytest.approx((2 * 200 + 2 * 200) / 1000 + (2 + 2 * 2) / 7 * 0.01)


NUM_ELEMENTS = 64 * 2 * WIDE_ROW


def seconds_of_row(length, narrow_weight_rate, *, shape=(), config=None, name="layers.{}.w"):
    """Return the seconds of a token of matrices with rows of this length, all of as many bytes."""
    cpu = replace(CPU_PROFILE, weight_rate={"BF16": 3000}, narrow_weight_rate=narrow_weight_rate, launch_seconds=0)
    tensors = {name.format(number): ("BF16", [*shape, NUM_ELEMENTS // length, length]) for number in range(2)}
    machine = replace(MACHINE, devices=(cpu,))
    return predicted({"cpu": 10**8}, machine, tensors=tensors, config=config).token_seconds


def test_matrices_with_short_rows_take_longer_than_as_many_bytes_of_wide_ones():
    num_bytes, rates = 2 * 2 * NUM_ELEMENTS, {"BF16": 2000}
    assert seconds_of_row(NARROW_ROW, rates) == pytest.approx(num_bytes / 2000)
    assert seconds_of_row(WIDE_ROW, rates) == pytest.approx(num_bytes / 3000)
    between = num_bytes * (1 / 3000 + (1 / 2000 - 1 / 3000) / 3)  # 1 / 2048 is a third of the way from 1 / 4096
    assert seconds_of_row(2 * NARROW_ROW, rates) == pytest.approx(between)
    assert num_bytes / 4500 < seconds_of_row(2 * WIDE_ROW, rates) < num_bytes / 3000
    assert seconds_of_row(NARROW_ROW // 2, rates) > num_bytes / 2000


@pytest.mark.parametrize("rates", [{}, {"F32": 1}, {"BF16": 3000}, {"BF16": 9000}])
def test_without_a_lower_rate_of_short_rows_one_rate_holds_for_all(rates):
    for length in (64, NARROW_ROW, WIDE_ROW):
        assert seconds_of_row(length, rates) == 2 * 2 * NUM_ELEMENTS / 3000


def test_a_rate_of_short_rows_that_only_noise_explains_bounds_that_of_long_ones():
    num_bytes = 2 * 2 * NUM_ELEMENTS
    assert seconds_of_row(NARROW_ROW, {"BF16": 1}) == pytest.approx(num_bytes / 1500)
    assert seconds_of_row(8 * WIDE_ROW, {"BF16": 1}) > num_bytes / 4500


@pytest.mark.parametrize(("shape", "length"), [((), 16), ((8,), 4)])
def test_convolutions_and_packed_words_have_no_rows(shape, length):
    assert seconds_of_row(length, {"BF16": 2000}, shape=shape) < seconds_of_row(WIDE_ROW, {"BF16": 2000}, shape=shape)


@pytest.mark.parametrize(("shape", "name"), [((), "layers.0.mlp.experts.{}.w"), ((2,), "layers.{}.mlp.experts.w")])
def test_experts_with_short_rows_take_longer(shape, name):
    config = {"model_type": "mixtral", "num_experts_per_tok": 1, "num_local_experts": 2}
    narrow, wide = (
        seconds_of_row(length, {"BF16": 2000}, shape=shape, name=name, config=config)
        for length in (NARROW_ROW, WIDE_ROW)
    )
    assert narrow == pytest.approx(1.5 * wide)


def test_a_parameter_beside_blocks_has_not_the_rows_of_its_module():
    blocks = {f"model.layers.{number}.mlp.w": ("BF16", [1024, NARROW_ROW]) for number in range(2)}
    cpu = replace(CPU_PROFILE, narrow_weight_rate={"BF16": 500}, launch_seconds=0)
    alone, beside = (
        predicted({"cpu": 10**8}, replace(MACHINE, devices=(cpu,)), tensors=tensors).token_seconds
        for tensors in (blocks, {"model.scale": ("BF16", [1]), **blocks})
    )
    assert beside == pytest.approx(alone)


@pytest.mark.parametrize(("shape", "is_slower"), [([1024, 1024], True), ([4096, 2048], False)])
def test_small_experts_come_at_the_rate_of_single_reads(shape, is_slower):
    config = {"model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8}
    tensors = {f"layers.0.mlp.experts.{number}.w": ("BF16", shape) for number in range(8)}
    tensors |= {"layers.0.attn.w": ("BF16", shape), "layers.1.attn.w": ("BF16", shape)}
    num_bytes = 2 * shape[0] * shape[1]

    def token_seconds(single_read_rate):
        machine = replace(MACHINE, disk_rate=10**7, single_read_rate=single_read_rate)
        budget = {"cpu": 5 * num_bytes}
        return predicted(budget, machine, ram_bytes=5 * num_bytes, tensors=tensors, config=config).token_seconds

    assert (token_seconds(10**3) > token_seconds(None)) == is_slower


def test_tokens_of_several_sequences_come_together():
    one, four = predicted({"cpu": 10_000}), predicted({"cpu": 10_000}, batch=4)
    assert four.tokens_per_second == pytest.approx(4 * one.tokens_per_second)


def test_a_machine_without_the_device_is_refused():
    with pytest.raises(OptionError, match="has no device cuda:0"):
        predicted({"cuda:0": 9000}, replace(MACHINE, devices=(CPU_PROFILE,)))


def test_bandwidths_that_were_asked_for_replace_those_of_the_profile():
    asked = with_bandwidth(MACHINE, disk=7, link=9)
    assert (asked.disk_rate, asked.devices[1].link_in, asked.devices[0].link_in) == (7, 9, None)


@given(LIMITS, RATES, RATES, RATES)
def test_no_prediction_beats_a_bound_and_more_bandwidth_is_never_slower(limits, disk, link, memory):
    assume(disk <= link)
    cpu, gpu = (replace(device, weight_rate={"BF16": memory}) for device in MACHINE.devices)
    machine = with_bandwidth(replace(MACHINE, devices=(cpu, gpu)), disk=disk, link=link)
    details = details_of(limits)
    plan = details.plan
    found = predict(plan, details.structure, machine, ram_bytes=0)  # the page cache keeps nothing
    assert found.token_seconds >= plan.token_bytes.get(DISK, 0) / disk * (1 - 1e-9)
    if plan.execution_device != CPU:
        assert found.token_seconds >= sum(plan.token_bytes.values()) / link * (1 - 1e-9)
    assert found.token_seconds >= (4 * BLOCK + EMBEDDING) / memory * (1 - 1e-9)
    if not any(plan.token_bytes.values()):
        assert not {"disk", "link", "ram"} & {step.lane for step in found.steps}
    for better in (with_bandwidth(machine, disk=2 * disk), with_bandwidth(machine, link=2 * link)):
        faster = predict(plan, details.structure, better, ram_bytes=0)
        assert faster.token_seconds <= found.token_seconds * (1 + 1e-9)
        assert faster.first_token_seconds <= found.first_token_seconds * (1 + 1e-9)
        assert faster.load_seconds <= found.load_seconds
