"""Reasons for a module's device agree with a recount."""

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bigload.devices import CPU, Device
from bigload.errors import DoesNotFitError, OptionError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.choices import Policy
from bigload.planning.options import options_of
from bigload.planning.placement.problem import device_loads, keeps_limits
from bigload.planning.planner import plan_details
from bigload.planning.questions.explain import explain
from builders import checkpoint_of, llama_config, llama_tensors

GPU, OTHER = Device("cuda", 0), Device("cuda", 1)


def drafted(sizes, budget, *, config=None, **wishes):
    return plan_details(
        checkpoint_of(sizes, config=config), MemoryBudget.of(budget), options_of(**{"overhead": 0, **wishes})
    )


def blocks(*sizes, **others):
    named = {f"model.layers.{index}.a.weight": size for index, size in enumerate(sizes)}
    return {"model.embed_tokens.weight": 2, **named, **others}


def text_of(answer, code):
    return next(reason.text for reason in answer.reasons if reason.code == code)


def codes(answer):
    return {reason.code for reason in answer.reasons}


@st.composite
def drafts(draw):
    sizes = blocks(*draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    if draw(st.booleans()):
        sizes |= {f"model.layers.0.mlp.experts.{expert}.up.weight": draw(st.integers(1, 9)) for expert in range(2)}
    limits = st.integers(1, 40)
    budget = {f"cuda:{index}": draw(limits) for index in range(draw(st.integers(0, 2)))}
    if not budget or draw(st.booleans()):
        budget["cpu"] = draw(limits)
    policy = draw(st.sampled_from(Policy))
    try:
        return drafted(sizes, budget, config={"num_experts_per_tok": 1}, policy=policy)
    except DoesNotFitError:
        assume(False)


@settings(deadline=None)
@given(made=drafts(), data=st.data())
def test_what_is_said_to_lack_room_is_over_a_limit_and_the_rest_is_not(made, data):
    key = data.draw(st.sampled_from(sorted(made.plan.homes)))
    problem = made.solution.problem
    index = next(i for i, unit in enumerate(problem.units) if any(part.name == key for part in unit.parts))
    answer = explain(made, key)
    assert {other.device for other in answer.alternatives} == {
        device for device, _ in problem.budget if device != made.plan.homes[key]
    }
    for other in answer.alternatives:
        homes = list(made.solution.placement.devices)
        homes[index] = other.device
        if any(unit.is_routed for unit in problem.units):
            continue  # what goes along is tested below
        first = next((home for home in homes if home.is_accelerator), made.plan.execution_device)
        trial = replace(
            made.solution.placement, devices=tuple(homes), execution_device=first, num_in_flight=problem.num_in_flight
        )
        assert other.keeps_limits == keeps_limits(problem, trial)
        loads = device_loads(problem, trial)
        assert other.lacking_bytes == {
            device: loads[device].total - limit
            for device, limit in problem.budget
            if limit is not None and loads[device].total > limit
        }
        assert other.more_device_changes == trial.num_device_changes - made.plan.num_device_changes


@settings(deadline=None)
@given(made=drafts(), data=st.data())
def test_no_trial_beats_a_proven_plan_but_by_breaking_the_order(made, data):
    assume(made.solution.placement.is_proven)
    answer = explain(made, data.draw(st.sampled_from(sorted(made.plan.homes))))
    for other in answer.alternatives:
        if other.keeps_limits and other.more_seconds < 0:
            assert "would not be in order" in other.text
    for reason in answer.reasons:
        if reason.code == "exchange" and "it would save" in reason.text:
            assert "would not be in order" in reason.text


def test_an_exchange_that_would_help_but_breaks_the_order_says_so():
    # Held are 2 and 1 beside a workspace of 2, and 3 and 2. With 2 and 2 on cuda:0, one byte less would be streamed,
    # but the last module would be on cuda:0.
    sizes = blocks(1, 1, 3, 2, 2)
    made = drafted(sizes, {"cuda:0": 5, "cuda:1": 5})
    told = text_of(explain(made, "model.layers.4"), "exchange")
    assert told.endswith("but modules would not be in order on the accelerators")


@settings(deadline=None)
@given(made=drafts())
def test_homes_of_everything_are_the_rows_of_the_plan(made):
    held = {home.device: home.num_bytes for home in explain(made, "model").homes}
    assert held == {use.device: use.weights_bytes for use in made.plan.devices if use.modules}


def test_a_full_device_says_what_is_free_and_what_is_needed():
    made = drafted(blocks(4, 4, 4), {"cuda:0": 10, "cuda:1": 4})
    answer = explain(made, "model.layers.2")
    assert [home.device for home in answer.homes] == [OTHER]
    (gpu, _disk) = answer.alternatives
    assert gpu.text == "cuda:0 has 0 B free, it needs 4 B"
    assert (gpu.keeps_limits, gpu.lacking_bytes) == (False, {GPU: 4})
    assert answer.headline == "model.layers.2 is on cuda:1 (4 B of weights), after model.layers.1 on cuda:0"


def test_a_device_with_room_says_what_moving_there_would_change():
    made = drafted(blocks(4, 4, 4, 4, 4), {"cuda:0": 20, "cuda:1": 20}, balance="fill")
    texts = {other.device: other.text for other in explain(made, "model.layers.1").alternatives}
    assert texts[OTHER] == "on cuda:1 it would take 2 more device changes"
    assert "more per token" in texts[Device("disk")]


def test_a_balanced_plan_says_how_full_the_fullest_would_be():
    made = drafted(blocks(5, 5, 5, 5), {"cuda:0": 20, "cuda:1": 20})
    texts = {other.device: other.text for other in explain(made, "model.layers.2").alternatives}
    assert texts[GPU] == "on cuda:0 it would run as fast; the fullest accelerator would be 85.0% full instead of 60.0%"


def test_a_streamed_module_says_why_and_what_that_costs():
    made = drafted(blocks(4, 4, 4), {"cuda:0": 10, "cpu": 20}, link_bandwidth="4GiB", disk_bandwidth="1GiB")
    name = next(key for key, home in made.plan.homes.items() if home == CPU)
    answer = explain(made, name)
    assert [(home.device, home.runs_on) for home in answer.homes] == [(CPU, GPU)]
    assert "at 4.00 GiB/s" in text_of(answer, "streamed")
    assert text_of(answer, "no-room") == (
        "all accelerators together have room for 10 B, and the model takes 14 B: "
        "they lack 4 B, and what streaming takes"
    )
    assert "would not save time" in text_of(answer, "exchange")


def test_a_policy_that_does_not_look_back_is_blamed():
    sizes = {f"model.layers.{index}.a.weight": size for index, size in enumerate([2, 2, 2, 3])}
    made = drafted(sizes, {"cuda:0": 7, "cpu": 40}, policy="sequential")
    told = text_of(explain(made, "model.layers.3"), "exchange")
    assert told.startswith("exchanged with model.layers.0 on cuda:0, it would save")
    assert told.endswith("the sequential policy does not look for that")
    exact = drafted(sizes, {"cuda:0": 7, "cpu": 40})
    assert "would not save time" in text_of(explain(exact, "model.layers.2"), "exchange")


def test_a_tied_head_says_to_what():
    made = drafted(llama_tensors(tied=True), {"cuda:0": "1MiB"}, config=llama_config(tied=True))
    answer = explain(made, "lm_head")
    assert text_of(answer, "tied") == "tied to model.embed_tokens: one memory, so one device"
    assert [(home.device, home.num_bytes) for home in answer.homes] == [(GPU, 0)]
    assert text_of(explain(made, "embed_tokens"), "tied") == "tied to lm_head: one memory, so one device"


def test_a_stored_copy_takes_no_memory():
    made = drafted(llama_tensors(), {"cuda:0": "1MiB"}, config=llama_config(tied=True))
    answer = explain(made, "lm_head.weight")
    assert {"copy", "tied"} <= codes(answer)
    assert answer.homes[0].num_bytes == 0


def test_a_tensor_is_part_of_its_block():
    made = drafted(llama_tensors(), {"cuda:0": "1MiB"})
    answer = explain(made, "layers.1.self_attn.q_proj.weight")
    assert answer.modules == ("model.layers.1",)
    assert text_of(answer, "part") == "part of model.layers.1, a repeated block, which is never split"
    assert answer.homes[0].num_bytes == 8 * 8 * 2


def mixture():
    sizes = {"model.embed_tokens.weight": 40}
    for index in range(3):
        sizes[f"model.layers.{index}.attn.weight"] = 20
        sizes |= {f"model.layers.{index}.mlp.experts.{expert}.up.weight": 30 for expert in range(8)}
    return drafted(sizes, {"cuda:0": 200, "cpu": 2000}, config={"num_experts_per_tok": 2}, experts="split")


def test_experts_apart_are_told_with_their_block():
    made = mixture()
    whole = explain(made, "model.layers.1")
    assert [(home.device, home.num_bytes) for home in whole.homes] == [(GPU, 20), (CPU, 240)]
    assert {other.module for other in whole.alternatives} == {"model.layers.1.attn", "model.layers.1.mlp.experts"}
    experts = explain(made, "model.layers.1.mlp.experts")
    assert text_of(experts, "experts").startswith("routed experts, placed apart from the rest of their block")
    assert "cuda:0 has" in experts.alternatives[0].text
    dense = explain(made, "model.layers.1.attn")
    assert "its routed experts are placed apart" in text_of(dense, "experts")


def test_experts_cannot_leave_their_block_for_another_accelerator():
    sizes = {"model.embed_tokens.weight": 40}
    for index in range(2):
        sizes[f"model.layers.{index}.attn.weight"] = 20
        sizes |= {f"model.layers.{index}.mlp.experts.{expert}.up.weight": 3 for expert in range(8)}
    config = {"num_experts_per_tok": 2}
    made = drafted(sizes, {"cuda:0": 200, "cuda:1": 200}, config=config, experts="split", balance="fill")
    (other, _disk) = explain(made, "model.layers.1.mlp.experts").alternatives
    assert not other.keeps_limits
    assert other.text == "on cuda:1 it would run elsewhere than the rest of its block"
    (block, _disk) = explain(made, "model.layers.1.attn").alternatives
    assert block.keeps_limits  # its experts go along
    assert block.text == "on cuda:1 it would take 1 more device change"


def test_layers_that_only_predict_further_tokens_are_on_no_device():
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    made = drafted(blocks(4, 4, 4), {"cuda:0": 20}, config=config)
    answer = explain(made, "model.layers.2")
    assert (answer.homes, answer.alternatives, codes(answer)) == ((), (), {"left-out"})
    assert answer.headline == "model.layers.2 is on no device"
    assert explain(made, "model.layers.2.a.weight").homes == ()
    assert text_of(explain(made, "model.layers"), "left-out").startswith("without model.layers.2")


def test_a_model_that_the_cpu_runs_says_so():
    made = drafted(blocks(4, 4), {"cuda:0": 1, "cpu": 40})
    answer = explain(made, "layers.0")
    assert "runs-on-cpu" in codes(answer)
    assert "streamed" not in codes(answer)


def test_a_module_of_many_is_described_without_trials():
    made = drafted(blocks(4, 4, 4), {"cuda:0": 10, "cuda:1": 4})
    answer = explain(made, "model.layers")
    assert {home.device: home.num_bytes for home in answer.homes} == {GPU: 8, OTHER: 4}
    assert answer.alternatives == ()
    assert "many" in codes(answer)


@pytest.mark.parametrize("name", ["model.layers.1", "layers.1", ".layers.1", " layers.1 "])
def test_the_end_of_a_name_is_enough(name):
    assert explain(drafted(blocks(4, 4), {"cuda:0": 40}), name).name == "model.layers.1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a", "is the end of 2 names.*model.layers.0.a, model.layers.1.a"),
        ("model.layer.1", "no module or tensor is called model.layer.1.*model.layers.1"),
        ("embed", "no module or tensor is called embed.*model.embed_tokens"),
        ("", "no module or tensor"),
        ("...", "no module or tensor"),
        ("x" * 10_000, "no module or tensor is called x{100}\n"),
        ("\x1b[2J", "no module or tensor"),
    ],
)
def test_a_name_that_nothing_or_several_things_have_is_refused(name, said):
    made = drafted(blocks(4, 4), {"cuda:0": 40})
    with pytest.raises(OptionError) as caught:
        explain(made, name)
    assert re.search(said, str(caught.value), re.DOTALL)
