"""Sizes and settings that llama.cpp has no model for are refused, with the numbers; its own models' are not."""

import pytest

from bigload.checkpoint.formats.gguf.families import FAMILIES
from bigload.checkpoint.formats.gguf.limits import check_computation, check_sizes
from bigload.errors import OptionError

OLMOE = {"attention.head_count": 16, "attention.head_count_kv": 16, "attention.key_length": 128}
OLMOE |= {"embedding_length": 2048, "rope.dimension_count": 128, "expert_count": 64, "expert_used_count": 8}
DEEPSEEK = {"expert_count": 256, "expert_used_count": 8, "expert_group_count": 8, "expert_group_used_count": 4}


@pytest.mark.parametrize(
    ("model_type", "sizes", "expected"),
    [
        ("olmoe", OLMOE, None),
        (
            "olmoe",
            {**OLMOE, "attention.head_count_kv": 4},
            "as many keys as queries.* head_count 16, .*head_count_kv 4",
        ),
        ("olmoe", {**OLMOE, "attention.key_length": 64, "rope.dimension_count": 64}, "as wide together"),
        ("olmoe", {**OLMOE, "expert_used_count": 65}, "no more experts for a token"),
        ("mamba", {"ssm.inner_size": 1536, "embedding_length": 768}, None),
        ("mamba", {"ssm.inner_size": 768, "embedding_length": 768}, "twice the hidden one"),
        ("deepseek_v3", DEEPSEEK, None),
        ("deepseek_v3", {**DEEPSEEK, "expert_group_count": 1, "expert_group_used_count": 1}, None),
        ("deepseek_v3", {**DEEPSEEK, "expert_group_count": 256}, "groups of two experts or more"),
        ("deepseek_v3", {**DEEPSEEK, "expert_group_count": 7}, "groups of two experts or more"),
        ("deepseek_v3", {**DEEPSEEK, "expert_group_used_count": 8}, "some but not all.* group_used_count 8"),
    ],
)
def test_sizes_that_llama_cpp_does_not_load_are_refused(model_type, sizes, expected):
    family = FAMILIES[model_type]
    metadata = {f"{family.architecture}.{key}": value for key, value in sizes.items()}
    if expected is None:
        check_sizes(metadata, family)
        return
    with pytest.raises(OptionError, match=expected.replace(".* ", ".*")):
        check_sizes(metadata, family)


LLAMA4 = {"num_hidden_layers": 8, "interleave_moe_layer_step": 2, "num_local_experts": 16}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"moe_layers": [1, 3, 5, 7], "no_rope_layers": [1, 1, 1, 0] * 2, "use_qk_norm": True}, None),
        ({"num_local_experts": 128, "use_qk_norm": False}, None),
        ({"num_local_experts": 128, "use_qk_norm": True}, "use_qk_norm is False"),
        ({"moe_layers": [1]}, r"moe_layers is \[1, 3, 5, 7\]"),
        ({"no_rope_layers": [1] * 8}, "no_rope_layers"),
        ({"attention_chunk_size": 4096}, "attention_chunk_size is 8192"),
        ({"layer_types": ["chunked_attention"] * 8}, "layer 3 is 'chunked_attention'"),
    ],
)
def test_llama_4_is_as_llama_cpp_has_it(config, expected):
    if expected is None:
        check_computation({**LLAMA4, **config}, FAMILIES["llama4_text"])
        return
    with pytest.raises(OptionError, match=expected):
        check_computation({**LLAMA4, **config}, FAMILIES["llama4_text"])
