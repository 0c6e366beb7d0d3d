import copy
import pickle

import pytest
import torch
from fused_models import mixture
from torch import nn

from bigload.errors import PartitionError
from bigload.parallel.tensor_parallel.apply import plan_tensor_parallel
from bigload.parallel.tensor_parallel.forwards import route_to_own
from bigload.parallel.tensor_parallel.plan import sliced
from bigload.planning.tensor_parallel.division import WHOLE, Division
from parallel_models import (
    HEADS,
    ROWS,
    WIDTH,
    Attention,
    Block,
    Chosen,
    FusedAttention,
    Model,
    Peeking,
    Routed,
    example,
    made,
    shared_keys,
    three_heads,
    two_key_heads,
)

HALVES = (((0, 12),), ((12, 24),))


def planned(make=Attention, size=2, kind=Model, policies=None, **options):
    with torch.device("meta"):
        model = made(make, kind, **options)
    return plan_tensor_parallel(model, size, example=example(), custom_policies=policies)


def codes(plan):
    return {note.code for note in plan.notes}


def test_layers_around_heads_are_divided_by_heads_and_their_number_is_local():
    plan = planned()
    assert plan.source == "inferred"
    assert plan.styles["blocks.1.attention.q"] == "colwise"
    assert plan.styles["blocks.1.attention.out"] == "rowwise"
    assert plan.division("blocks.1.attention.q.weight") == Division(0, HALVES)
    assert plan.division("blocks.1.attention.q.bias") == Division(0, HALVES)
    assert plan.division("blocks.1.attention.out.weight") == Division(1, HALVES)
    assert plan.division("blocks.1.attention.out.bias") == WHOLE
    assert plan.attributes["blocks.1.attention.num_heads"] == HEADS // 2


def test_queries_keys_and_values_in_one_are_divided_part_by_part():
    plan = planned(FusedAttention)
    of_first = ((0, 12), (24, 36), (48, 60))
    assert plan.division("blocks.0.attention.qkv.weight").dim == 1
    assert plan.division("blocks.0.attention.qkv.weight").ranges[0] == of_first
    assert plan.attributes["blocks.0.attention.split_size"] == WIDTH // 2


def test_gates_and_what_scales_their_channels_are_divided_alike():
    plan = planned()
    assert plan.division("blocks.0.feed.gate_up.weight").ranges[1] == ((24, 48), (72, 96))
    assert plan.division("blocks.0.feed.scale") == Division(0, (((0, 24),), ((24, 48),)))
    assert plan.styles["blocks.0.feed"] == "local_params"


def test_a_weight_with_two_names_is_divided_once():
    plan = planned()
    rows = (((0, 26),), ((26, ROWS),))
    assert plan.division("table.weight") == plan.division("head.weight") == Division(0, rows)
    assert (plan.styles["table"], plan.styles["head"]) == ("embedding_rowwise", "colwise_gather_output")


def test_a_weight_that_is_read_past_its_layer_stays_whole():
    plan = planned(kind=Peeking)
    assert plan.division("table.weight") == WHOLE
    assert "table" not in plan.styles
    assert plan.styles["blocks.0.attention.q"] == "colwise"


def test_what_is_made_for_all_heads_is_cut_where_it_comes_in():
    plan = planned(has_head_bias=True)
    (argument,) = plan.arguments["blocks.1.attention"]
    assert (argument.name, argument.dim, argument.count) == ("bias", 1, HEADS)


def test_keys_that_all_queries_read_stay_whole_and_that_is_said():
    plan = planned(shared_keys)
    assert plan.division("blocks.0.attention.k.weight") == WHOLE
    assert plan.division("blocks.0.attention.q.weight") == Division(0, HALVES)
    assert "replicated" in codes(plan)


def test_ranks_that_outnumber_heads_of_keys_share_them():
    plan = planned(two_key_heads, 4)
    assert plan.division("blocks.0.attention.k.weight").ranges == (((0, 6),), ((0, 6),), ((6, 12),), ((6, 12),))
    assert plan.attributes["blocks.0.attention.num_key_heads"] == 1
    assert "shared-heads" in codes(plan)


def test_heads_that_do_not_divide_are_not_cut_but_their_layers_are_one_by_one():
    plan = planned(three_heads)
    assert plan.styles["blocks.0.attention.q"] == "colwise_gather_output"
    assert plan.styles["blocks.0.attention.out"] == "colwise_gather_output"
    assert "blocks.0.attention.num_heads" not in plan.attributes
    assert plan.styles["blocks.0.feed.down"] == "rowwise"
    assert "gathered" in codes(plan)


@pytest.mark.parametrize("make", [Attention, FusedAttention, two_key_heads, three_heads])
@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.sample(2)
def test_every_element_is_with_some_rank_and_shares_are_near_even(make, size):
    plan = planned(make, size)
    for name, shape in plan.shapes.items():
        division = plan.division(name)
        if division.dim is not None:
            held = {index for pairs in division.ranges for start, stop in pairs for index in range(start, stop)}
            assert held == set(range(shape[division.dim])), name
    assert max(map(plan.num_elements, range(size))) < 1.25 / size * sum(
        torch.Size(shape).numel() for shape in plan.shapes.values()
    )


def test_a_plan_is_the_same_with_and_without_values_and_travels():
    plan = plan_tensor_parallel(made(), 2, example=example())
    assert plan == planned()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_planning_leaves_the_model_as_it_is():
    model = made()
    before = {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.state_dict().items()}
    places = {name: dict(vars(module)) for name, module in model.named_modules()}
    plan_tensor_parallel(model, 2, example=example())
    assert {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.state_dict().items()} == before
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == places


def test_one_rank_has_it_all():
    plan = planned(size=1)
    assert not plan.styles
    assert set(plan.divisions.values()) == {WHOLE}


def test_a_model_whose_inputs_are_not_known_is_divided_layer_by_layer_and_that_is_said():
    plan = plan_tensor_parallel(made(), 2)
    assert set(plan.styles.values()) == {"colwise_gather_output", "embedding_rowwise"}
    assert "unproven" in codes(plan)


def test_rules_of_the_caller_go_first():
    rules = {"attention.q": "colwise_gather_output", "feed": "replicate", "attention.out": "rowwise_split_input"}
    plan = planned(policies=rules)
    assert plan.source == "custom"
    assert plan.styles["blocks.0.attention.q"] == "colwise_gather_output"
    assert plan.styles["blocks.0.attention.out"] == "rowwise_split_input"
    assert not plan.attributes


def test_rules_need_not_name_the_attributes_that_become_local():
    plan = planned(policies={"attention.out": "rowwise", "attention.*": "colwise"})
    assert plan.source == "custom"
    assert plan.attributes["blocks.0.attention.num_heads"] == HEADS // 2


class Fused:
    def __init__(self, weight, n_fused=None):
        self.weight, self.n_fused = weight, n_fused


class OldPolicy:
    """In the form of parallelformers."""

    @staticmethod
    def original_layer_class():
        return Block

    @staticmethod
    def replace_arguments(config, world_size):
        return {"attention.split_size": WIDTH // world_size}

    @staticmethod
    def attn_qkv():
        return [Fused("attention.qkv.weight", n_fused=3)]

    @staticmethod
    def attn_out():
        return [Fused("attention.out.weight")]

    @staticmethod
    def mlp_in():
        return []

    mlp_out = mlp_in


@pytest.mark.parametrize("policies", [OldPolicy, [OldPolicy], OldPolicy()])
def test_policies_of_parallelformers_are_understood_and_what_they_leave_out_is_found(policies):
    plan = planned(FusedAttention, policies=policies)
    assert plan.source == "custom"
    assert plan.styles["blocks.1.feed.down"] == "rowwise"
    assert plan.division("blocks.1.attention.qkv.weight").ranges[0] == ((0, 12), (24, 36), (48, 60))
    assert plan.attributes["blocks.1.attention.split_size"] == WIDTH // 2


def test_experts_that_had_nothing_to_do_are_divided_as_the_others():
    plan = planned(Routed)
    for name in ("0.weight", "0.bias", "2.weight"):
        assert plan.division(f"blocks.0.attention.experts.0.{name}") == plan.division(
            f"blocks.0.attention.experts.1.{name}"
        )
    assert plan.division("blocks.0.attention.experts.2.0.weight").dim == 0
    assert plan.styles["blocks.1.attention.experts.2.2"] == "rowwise"


class Experts(Chosen):
    def forward(self, x, bias=None):
        return super().forward(x)


def test_experts_stored_in_one_are_divided_by_rules():
    rules = {"attention": "moe_tp_experts", "attention.up": "colwise", "attention.down": "rowwise"}
    plan = planned(Experts, policies=rules)
    assert plan.styles["blocks.0.attention"] == "moe_tp_experts"
    assert plan.division("blocks.0.attention.up").dim == 1
    assert plan.division("blocks.0.attention.down").dim == 2


def test_ranks_with_other_experts_sum_to_the_whole():
    model, ids = mixture(), torch.tensor([3, 17, 40])
    rules = {"experts": "moe_ep_experts", "experts.*": "grouped_gemm"}
    plan = plan_tensor_parallel(model, 2, custom_policies=rules, example={"ids": ids})
    assert plan.styles["layers.0.experts"] == "moe_ep_experts"
    assert plan.attributes["layers.0.experts.num_experts"] == 6
    experts, x = model.layers[0].experts, torch.randn(3, 8)
    weights, chosen = torch.rand(3, 2), torch.tensor([[0, 11], [6, 5], [2, 3]])
    parts = []
    for rank in range(2):
        part = copy.deepcopy(experts)
        part.num_experts = 6
        for key, value in experts.named_parameters():
            division = plan.division(f"layers.0.experts.{key}")
            part._parameters[key] = torch.nn.Parameter(sliced(value.detach(), division, rank))
        route_to_own(part, rank)
        parts.append(part(x, chosen, top_k_weights=weights))
    assert torch.allclose(sum(parts), experts(x, chosen, weights), atol=1e-6)


def test_experts_of_other_ranks_need_a_module_that_is_routed_to():
    with pytest.raises(PartitionError, match="does not divide") as caught:
        plan_tensor_parallel(
            mixture(), 2, custom_policies={"experts.*": "grouped_gemm"}, example={"ids": torch.ones(1)}
        )
    assert "no forward is known for ranks that hold different experts" in caught.value.details


@pytest.mark.parametrize(
    ("rules", "size", "text"),
    [
        ({"attention.q": "colwide"}, 2, "'colwide' is no style of a rule"),
        ({"attention.q": "colwise"}, 5, "blocks.0.attention.q does not divide among 5 ranks"),
        ({"attention.q": "colwise"}, 2, "the policies do not suit this model on 2 ranks"),
        ({"norm": "colwise"}, 2, r"blocks.0.norm \(LayerNorm\) cannot be divided colwise"),
        ({"attention.nothing": "colwise"}, 2, "policies without a match in Model"),
        ({"attention.q": 3}, 2, "styles by patterns of names"),
        ({}, 0, "cannot divide among 0 ranks"),
        (nn.Linear, 2, "is no policy"),
    ],
)
def test_rules_that_cannot_be_are_errors(rules, size, text):
    with pytest.raises(PartitionError, match=text):
        planned(size=size, policies=rules)


def test_a_model_of_no_layers_has_an_empty_plan():
    plan = plan_tensor_parallel(nn.Sequential(nn.ReLU()), 2, example={"input": torch.ones(2)})
    assert (dict(plan.shapes), dict(plan.styles)) == ({}, {})


def test_a_model_that_is_a_layer_stays_whole():
    plan = plan_tensor_parallel(nn.Linear(4, 8), 2, example={"input": torch.ones(1, 4)})
    assert (plan.styles, {division.dim for division in plan.divisions.values()} - {None}) == ({}, set())
