import pytest

from bigload.checkpoint.model import TensorInfo
from bigload.planning.model.config import ModelConfig
from bigload.planning.model.experts import dense_parts, routed_experts
from bigload.planning.model.module_tree import blocks_of, build_tree
from builders import checkpoint_of

DENSE = {"self_attn.q_proj.weight": 5, "input_layernorm.weight": 1}


def block_of(parts):
    """The first of two blocks `layers.0` and `layers.1` with `parts`."""
    tensors = {f"layers.{index}.{name}": form for index in range(2) for name, form in parts.items()}
    return next(blocks_of(build_tree(checkpoint_of(tensors).tensors)))


def experts_of(parts, **config):
    return routed_experts(block_of(parts), ModelConfig(config or None))


def separate(prefix, count, *, num_bytes=8, key="{}"):
    return {f"{prefix}.{key.format(index)}.up_proj.weight": num_bytes for index in range(count)}


FAMILIES = {
    "deepseek": (
        {
            **DENSE,
            "mlp.gate.weight": 2,
            "mlp.gate.e_score_correction_bias": 1,
            **separate("mlp.experts", 16),
            "mlp.shared_experts.up_proj.weight": 8,
        },
        {"n_routed_experts": 16, "num_experts_per_tok": 4},
        ("mlp.experts", 128, 16, 4, True, 8),
        "mlp.shared_experts mlp.gate self_attn input_layernorm",
    ),
    "mixtral": (
        {**DENSE, "block_sparse_moe.gate.weight": 2, **separate("block_sparse_moe.experts", 8)},
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        ("block_sparse_moe.experts", 64, 8, 2, True, 8),
        "block_sparse_moe.gate self_attn input_layernorm",
    ),
    "minimax": (
        {
            **DENSE,
            "block_sparse_moe.e_score_correction_bias": 2,
            "block_sparse_moe.gate.weight": 2,
            **separate("block_sparse_moe.experts", 8),
        },
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        ("block_sparse_moe.experts", 64, 8, 2, True, 8),
        "block_sparse_moe.e_score_correction_bias block_sparse_moe.gate self_attn input_layernorm",
    ),
    "dbrx": (
        {
            "norm_attn_norm.attn.Wqkv.weight": 8,
            "ffn.router.layer.weight": 2,
            "ffn.experts.mlp.w1": ("U8", [12, 2]),
            "ffn.experts.mlp.v1": ("U8", [12, 2]),
        },
        {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}},
        ("ffn.experts", 48, 4, 2, False, 12),
        "ffn.router norm_attn_norm",
    ),
    "gpt_oss": (
        {
            **DENSE,
            "mlp.router.weight": 2,
            "mlp.experts.gate_up_proj_blocks": ("U8", [4, 6, 2, 2]),
            "mlp.experts.gate_up_proj_scales": ("U8", [4, 6, 2]),
            "mlp.experts.gate_up_proj_bias": ("U8", [4, 6]),
        },
        {"num_local_experts": 4, "num_experts_per_tok": 1},
        ("mlp.experts", 168, 4, 1, False, 42),
        "mlp.router self_attn input_layernorm",
    ),
    "llama4": (
        {
            **DENSE,
            "feed_forward.router.weight": 2,
            "feed_forward.experts.gate_up_proj": ("U8", [4, 3, 2]),
            "feed_forward.experts.down_proj": ("U8", [4, 2, 3]),
            "feed_forward.shared_expert.up_proj.weight": 6,
        },
        {"text_config": {"num_local_experts": 4, "num_experts_per_tok": 1}},
        ("feed_forward.experts", 48, 4, 1, False, 12),
        "feed_forward.shared_expert feed_forward.router self_attn input_layernorm",
    ),
    "jamba": (
        {"mamba.in_proj.weight": 4, "feed_forward.router.weight": 2, **separate("feed_forward.experts", 4)},
        {"num_experts": 4, "num_experts_per_tok": 2},
        ("feed_forward.experts", 32, 4, 2, True, 8),
        "feed_forward.router mamba",
    ),
    "nllb": (
        {**DENSE, "ffn.router.classifier.weight": 2, **separate("ffn.experts", 4, key="expert_{}")},
        {"num_experts": 4},
        ("ffn.experts", 32, 4, None, True, 8),
        "ffn.router self_attn input_layernorm",
    ),
    "granite": (
        {
            **DENSE,
            "block_sparse_moe.router.layer.weight": ("U8", [4, 2]),
            "block_sparse_moe.input_linear.weight": ("U8", [4, 6, 2]),
            "block_sparse_moe.output_linear.weight": ("U8", [4, 2, 3]),
            "shared_mlp.input_linear.weight": ("U8", [6, 2]),
        },
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        ("block_sparse_moe.input_linear block_sparse_moe.output_linear", 72, 4, 2, False, 18),
        "shared_mlp block_sparse_moe.router self_attn input_layernorm",
    ),
}
"""Parts of a block, config, what the experts are, and the dense parts."""


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def below(name):
    return name.removeprefix("layers.0.")


def test_the_routed_experts_of_a_family_are_found(family):
    parts, config, expected, _ = family
    found = experts_of(parts, **config)
    modules = " ".join(below(name) for name in found.modules)
    facts = (modules, found.num_bytes, found.num_experts, found.top_k, found.are_separate, found.largest_expert_bytes)
    assert facts == expected


def test_the_dense_parts_of_a_family_are_all_the_rest(family):
    parts, config, _, expected = family
    block = block_of(parts)
    dense = dense_parts(block, routed_experts(block, ModelConfig(config)))
    assert sorted(below(part.name) for part in dense) == sorted(expected.split())


def test_dense_parts_and_experts_hold_every_tensor_once(family):
    parts, config, _, _ = family
    block = block_of(parts)
    experts = routed_experts(block, ModelConfig(config))
    dense = dense_parts(block, experts)
    names = [*experts.modules, *(part.name for part in dense)]
    holders = {t.name: sum(f"{t.name}.".startswith(f"{name}.") for name in names) for t in block.all_tensors()}
    assert set(holders.values()) == {1}
    assert experts.num_bytes + sum(part.num_bytes for part in dense) == block.num_bytes


def test_a_tensor_beside_the_experts_is_a_part_by_itself():
    block = block_of({"moe.bias": 2, **separate("moe.experts", 4)})
    (part,) = dense_parts(block, routed_experts(block, ModelConfig(None)))
    assert isinstance(part, TensorInfo)


def test_a_dense_block_has_no_routed_experts():
    assert experts_of(DENSE, num_experts=8, num_experts_per_tok=2) is None


def test_shared_experts_alone_are_no_routed_experts():
    assert experts_of({**DENSE, "mlp.shared_experts.experts.up.weight": 8}) is None


def test_a_pruned_model_has_the_experts_that_are_stored():
    found = experts_of(separate("mlp.experts", 6), num_experts=8, num_experts_per_tok=7)
    assert (found.num_experts, found.top_k) == (6, 6)


def test_the_active_bytes_are_those_of_the_experts_that_run():
    assert experts_of(separate("mlp.experts", 8), num_experts_per_tok=2).active_bytes == 16


def test_without_a_config_all_experts_count_as_active():
    found = experts_of(separate("mlp.experts", 8))
    assert (found.num_experts, found.top_k, found.active_bytes) == (8, None, 64)


def test_stacked_matrices_without_a_config_are_of_an_unknown_number():
    found = experts_of(FAMILIES["dbrx"][0])
    assert (found.num_experts, found.largest_expert_bytes, found.active_bytes) == (None, 48, 48)


def test_experts_of_unlike_size_are_weighed_by_the_largest():
    found = experts_of({"mlp.experts.0.w.weight": 3, "mlp.experts.1.w.weight": 7})
    assert (found.largest_expert_bytes, found.num_bytes) == (7, 10)


def test_experts_of_a_single_tensor_each_are_separate():
    assert experts_of({"mlp.experts.0.weight": 3, "mlp.experts.1.weight": 3}).are_separate


def test_a_lone_module_between_experts_is_passed_through():
    found = experts_of(separate("mlp.experts.deepspeed_experts", 4))
    assert (found.num_experts, found.modules) == (4, ("layers.0.mlp.experts",))


@pytest.mark.parametrize("odd", [True, 0, -3, 2.5, "4", [4], {"x": 4}, None, 10**40])
def test_a_config_of_odd_values_is_survived(odd):
    parts, _, _, _ = FAMILIES["dbrx"]
    found = experts_of(parts, ffn_config={"moe_num_experts": odd, "moe_top_k": odd}, num_experts_per_tok=odd)
    assert (found.num_experts, found.top_k) == (None, None)
    assert experts_of(parts, ffn_config=odd).num_experts is None


@pytest.mark.parametrize("shape", [[], [0], [0, 4, 4]])
def test_experts_without_elements_or_dimensions_are_survived(shape):
    assert experts_of({"mlp.experts.scale": ("U8", shape)}, num_experts=4).num_experts is None


def test_many_modules_of_experts_are_taken_out_of_one_block():
    parts = {f"part{index}.{name}.weight": 1 for index in range(50) for name in ("experts.0", "gate")}
    block = block_of(parts)
    experts = routed_experts(block, ModelConfig(None))
    assert len(experts.modules) == 50
    assert {below(part.name) for part in dense_parts(block, experts)} == {f"part{index}.gate" for index in range(50)}
