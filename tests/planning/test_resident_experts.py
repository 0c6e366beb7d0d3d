"""Experts that recorded uses keep on the execution device: which, counted, written, read back, refused if wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from bigload.devices import CPU, DISK, Device
from bigload.errors import InvalidPlanError, OptionError
from bigload.planning.budget.budget import MemoryBudget
from bigload.planning.expert_stats import ExpertStats
from bigload.planning.options import options_of
from bigload.planning.placement.optimality import Verdict
from bigload.planning.plan_file import check_plan, plan_from_json, plan_to_json
from bigload.planning.planner import plan, plan_details
from bigload.planning.questions.explain import explain
from builders import checkpoint_of

CONFIG = {"model_type": "x", "num_experts_per_tok": 1}
TENSORS = {
    "embed.weight": 10,
    **{
        f"layers.{layer}.{name}": num_bytes
        for layer in range(3)
        for name, num_bytes in {
            "attn.w": 10,
            "mlp.gate.weight": 10,
            **{f"mlp.experts.{number}.w": 10 for number in range(4)},
        }.items()
    },
    "lm_head.weight": 10,
}
"""80 bytes that all tokens need, and 3 layers of 4 experts of 10 bytes."""

USES = {
    "layers.0.mlp.experts": (97, 1, 1, 1),
    "layers.1.mlp.experts": (40, 30, 20, 10),
    "layers.2.mlp.experts": (0, 60, 0, 40),
}
CUDA0 = Device("cuda", 0)
SCHEMA = json.loads((Path(__file__).parents[2] / "docs/schemas/plan-1.2.json").read_text())


def model():
    return checkpoint_of(TENSORS, config=CONFIG)


def planned(max_memory, uses=USES, **options):
    budget = MemoryBudget.of(max_memory)
    return plan(model(), budget, overhead=0, expert_stats=uses and ExpertStats(uses=uses), **options)


def test_the_most_used_experts_of_all_layers_stay_in_ram():
    # 80 bytes of dense weights, 2 x 10 for experts on their way, and room for five that stay.
    made = planned({"cpu": 150})
    assert {str(made.homes[f"layers.{layer}.mlp.experts"]) for layer in range(3)} == {"disk"}
    assert made.resident_experts.experts == {
        "layers.0.mlp.experts": (0,),
        "layers.1.mlp.experts": (0, 1),
        "layers.2.mlp.experts": (1, 3),
    }
    assert (made.resident_experts.num_bytes, made.resident_experts.num_uses) == (50, 267)
    (ram, disk) = made.devices
    assert (ram.weights_bytes, ram.workspace_bytes, ram.free_bytes) == (80, 70, 0)
    assert disk.weights_bytes == 120
    # A token uses one expert of 10 bytes per layer: 0.3 and 3 and 0 of them are expected from the disk.
    assert made.token_bytes == {CPU: 80, DISK: 1 + 3 + 0}
    assert made.certificate.verdict is Verdict.BOUNDED


def test_less_is_expected_to_be_read_than_with_whole_layers_in_ram():
    assert planned({"cpu": 150}, uses=None).token_bytes[DISK] > planned({"cpu": 150}).token_bytes[DISK]


def test_experts_stay_on_the_accelerator_and_ram_has_the_layers_that_are_fetched_from_most():
    made = planned({"cuda:0": 120, "cpu": 60})
    assert made.execution_device == CUDA0
    assert made.resident_experts.num_experts == 2
    assert made.resident_experts.experts == {"layers.0.mlp.experts": (0,), "layers.2.mlp.experts": (1,)}
    homes = {layer: str(made.homes[f"layers.{layer}.mlp.experts"]) for layer in range(3)}
    assert homes == {0: "disk", 1: "cpu", 2: "disk"}
    assert made.devices[0].free_bytes == 0


def test_a_model_that_fits_has_no_resident_experts():
    made = planned({"cpu": 500})
    assert made.resident_experts is None
    assert made.document()["resident_experts"]["experts"] == {}
    assert plan_to_json(made) == plan_to_json(planned({"cpu": 500}, uses=None))


def test_where_the_rest_of_the_model_has_no_room_the_plan_is_that_without_a_record():
    assert planned({"cuda:0": 60, "cpu": 500}).homes == planned({"cuda:0": 60, "cpu": 500}, uses=None).homes


def test_experts_that_were_never_used_do_not_stay():
    made = planned({"cpu": 199}, uses={**USES, "layers.2.mlp.experts": (0, 7, 0, 0)})
    assert made.resident_experts.experts["layers.2.mlp.experts"] == (1,)
    assert made.resident_experts.num_uses == made.resident_experts.num_recorded
    assert made.token_bytes[DISK] == 0


def test_the_plan_file_has_them_and_is_read_back_to_the_byte():
    made = planned({"cpu": 150})
    text = plan_to_json(made)
    Draft202012Validator(SCHEMA).validate(json.loads(text))
    read = plan_from_json(text)
    assert read == made
    assert plan_to_json(read) == text == plan_to_json(planned({"cpu": 150}))
    check_plan(read, model())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_bytes": 40}, "it gives resident experts 40 bytes, they have 50"),
        ({"experts": {"layers.0.mlp.experts": (4,)}}, "it keeps experts of layers.0.mlp.experts resident"),
        ({"experts": {"layers.0.attn": (0,)}}, "it keeps experts of layers.0.attn resident"),
    ],
)
def test_a_plan_that_was_changed_is_refused(change, words):
    made = planned({"cpu": 150})
    changed = replace(made, resident_experts=made.resident_experts._replace(**change))
    with pytest.raises(InvalidPlanError) as caught:
        check_plan(changed, model())
    assert words in caught.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"num_bytes": 71},
        {"num_uses": -1},
        {"experts": {"layers.0.mlp.experts": [1, 0]}},
        {"experts": {"layers.0.mlp.experts": [0, 0]}},
        {"experts": {"layers.0.mlp.experts": ["a"]}},
        {"stats_sha256": 3},
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change):
    document = planned({"cpu": 150}).document()
    document["resident_experts"] |= change
    with pytest.raises(InvalidPlanError):
        plan_from_json(json.dumps(document))


def test_the_record_of_another_model_is_refused_with_all_that_differs():
    uses = {"layers.0.mlp.experts": (1, 2), "layers.1.mlp.experts": (1, 1, 1, 1), "layers.7.mlp.experts": (1,)}
    with pytest.raises(OptionError, match="of another model: 3 modules") as caught:
        planned({"cpu": 150}, uses=uses)
    assert caught.value.details == (
        "layers.0.mlp.experts has 4 experts, recorded were 2",
        "layers.7.mlp.experts has 0 experts, recorded were 1",
        "layers.2.mlp.experts has 4 experts, none were recorded",
    )


def test_options_that_keep_experts_with_their_block_contradict_it():
    with pytest.raises(OptionError, match="one by one") as caught:
        planned({"cpu": 150}, policy="sequential", experts="block", names="transformers")
    assert len(caught.value.details) == 3


def test_explain_says_which_experts_stay():
    options = options_of(overhead=0, expert_stats=ExpertStats(uses=USES))
    details = plan_details(model(), MemoryBudget.of({"cpu": 150}), options)
    reasons = {reason.code: reason.text for reason in explain(details, "layers.1.mlp.experts").reasons}
    assert reasons["resident-experts"] == "2 of its 4 experts stay on cpu, those that were used most: 0-1"


def test_the_table_says_how_many_stay():
    text = str(planned({"cpu": 150}))
    assert "It also holds the 5 most used experts, 50 B, with 89% of recorded uses." in text
