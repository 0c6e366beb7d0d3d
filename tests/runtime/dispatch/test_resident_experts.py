"""Experts that a plan keeps on the execution device are there from the beginning and stay; results are the same."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from fused_models import EXPERT_BYTES, NUM_EXPERTS, TOP_K, chosen_experts, fetched_experts, mixture
from streamed_models import save

import bigload
from bigload.errors import InvalidPlanError
from bigload.planning.expert_stats import ExpertStats
from bigload.runtime.streaming.streamed_block import Residency

LAYERS = 3
USES = {
    f"layers.{layer}.experts": tuple((7 * number + layer) % NUM_EXPERTS for number in range(NUM_EXPERTS))
    for layer in range(LAYERS)
}


@pytest.fixture(scope="module")
def plain():
    return mixture()


@pytest.fixture(scope="module")
def folder(plain, tmp_path_factory):
    made = save(plain, tmp_path_factory.mktemp("mixture") / "checkpoint")
    (made / "config.json").write_text(json.dumps({"model_type": "x", "num_experts_per_tok": TOP_K}))
    return made


@pytest.fixture(scope="module")
def planned(plain, folder):
    experts = LAYERS * NUM_EXPERTS * EXPERT_BYTES
    dense = sum(each.nbytes for each in plain.parameters()) - experts
    room = dense + (NUM_EXPERTS * 2 + 8) * EXPERT_BYTES  # two layers on their way, and eight experts that stay
    return bigload.plan(folder, {"cpu": room}, expert_stats=ExpertStats(uses=USES))


def resident(model):
    blocks = [block for block in model._hf_hook.streamer._blocks if block.is_routed]
    return {block.name for block in blocks if block.residency is Residency.RESIDENT}


def empty():
    with bigload.init_empty_weights():
        return mixture()


def names(plan):
    return {f"{name}.{number}" for name, numbers in plan.resident_experts.experts.items() for number in numbers}


def test_they_are_there_before_the_first_forward_and_are_never_read_again(plain, folder, planned):
    assert len(names(planned)) == 8
    model = bigload.load_and_dispatch(empty(), planned, resident_bytes=0)
    assert resident(model) == names(planned)
    before = fetched_experts(model)
    assert sorted(before) == sorted(names(planned))
    chosen = []
    with torch.no_grad():
        for ids in torch.randint(0, 64, (6, 4), generator=torch.Generator().manual_seed(1)):
            assert torch.equal(model(ids), plain(ids))
            chosen += chosen_experts(plain, ids)
            assert names(planned) <= resident(model)
    assert names(planned) & set(chosen), "some of them are used"
    assert not names(planned) & set(fetched_experts(model)[len(before) :])


def test_copies_have_them_too(plain, planned):
    model = copy.deepcopy(bigload.load_and_dispatch(empty(), planned, resident_bytes=0))
    ids = torch.tensor([3, 17, 40])
    for _ in range(2):
        assert torch.equal(model(ids), plain(ids))
    assert resident(model) == names(planned) & set(chosen_experts(plain, ids))


def test_whole_blocks_take_none(plain, planned):
    model = bigload.load_and_dispatch(empty(), planned, experts_on_demand=False)
    ids = torch.tensor([3, 17, 40])
    assert torch.equal(model(ids), plain(ids))
    assert fetched_experts(model) == []


def test_experts_that_the_model_does_not_have_are_refused(planned):
    other = planned.resident_experts._replace(experts={"layers.0.mlp": (0,), "layers.1.experts": (NUM_EXPERTS,)})
    with pytest.raises(InvalidPlanError, match=r"Mixture does not have: layers\.0\.mlp, layers\.1\.experts"):
        bigload.load_and_dispatch(empty(), replace(planned, resident_experts=other))
