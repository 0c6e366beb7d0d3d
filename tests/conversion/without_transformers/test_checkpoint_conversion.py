"""Conversions without torch: equal to those that transformers' loader made when samples were written, or refused."""

import json
import re
from pathlib import Path

import pytest

from bigload.conversion.strided_pieces import PiecedTensor, StridedPiece
from bigload.conversion.without_transformers import operations
from bigload.conversion.without_transformers.checkpoint_conversion import conversion_of_checkpoint
from bigload.errors import NamesUnknownError
from builders import checkpoint_of

SAMPLES = json.loads(Path(__file__).with_name("samples.json").read_text())


def checkpoint(config, shapes):
    return checkpoint_of({name: ("F32", shape) for name, shape in shapes.items()}, config=config)


def config(model_type, architecture, **more):
    return {"model_type": model_type, "architectures": [architecture], **more}


FUSED = "model.layers.0.mlp.experts.down_proj"
MIXTRAL = config("mixtral", "MixtralForCausalLM")


def mixtral(*experts, weights=("w1", "w2", "w3")):
    shapes = {"w1": [4, 2], "w2": [2, 4], "w3": [4, 2]}
    return {
        f"model.layers.0.block_sparse_moe.experts.{expert}.{weight}.weight": shapes[weight]
        for expert in experts
        for weight in weights
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["config"]["model_type"])
def test_a_conversion_is_that_of_transformers_loader(sample):
    found = conversion_of_checkpoint(checkpoint(sample["config"], sample["stored"]))
    expected = {
        name: PiecedTensor(
            tuple(shape), tuple(StridedPiece(piece[0], piece[1], *map(tuple, piece[2:])) for piece in pieces)
        )
        for name, (shape, pieces) in sample["made"].items()
    }
    assert found.tensors == expected
    assert (found.unexpected, found.ignored, found.problems) == ((), (), ())


def names(told, stored):
    found = conversion_of_checkpoint(checkpoint(told, {key: [2, 2] for key in stored.split()}))
    assert found.problems == ()
    return " ".join(found.tensors)


def test_a_base_model_is_loaded_with_a_head_and_back():
    assert names(config("gpt2", "GPT2LMHeadModel"), "wte.weight h.0.ln_1.weight lm_head.weight") == (
        "transformer.h.0.ln_1.weight lm_head.weight transformer.wte.weight"
    )
    assert names(config("bert", "BertModel"), "bert.embeddings.LayerNorm.gamma") == "embeddings.LayerNorm.weight"


def test_a_fused_checkpoint_stays_as_it_is():
    stored = "model.layers.0.mlp.experts.gate_up_proj model.layers.0.mlp.experts.down_proj"
    assert set(names(MIXTRAL, stored).split()) == set(stored.split())


def test_the_model_within_is_the_one_that_the_configuration_names():
    told = config("llava", "LlavaForConditionalGeneration", vision_config={"model_type": "siglip_vision_model"})
    stored = "vision_tower.vision_model.encoder.layers.0.layer_norm1.weight"
    assert names(told, stored) == "model.vision_tower.encoder.layers.0.layer_norm1.weight"


def test_a_text_model_in_a_file_of_its_multimodal_model_is_the_text_model():
    told = config("qwen3_5_moe_text", "Qwen3_5MoeForConditionalGeneration")
    assert names(told, "model.language_model.norm.weight") == "model.norm.weight"


def test_numbers_that_rules_name_are_no_layer_numbers():
    told = config("kimi_k25", "KimiK25ForConditionalGeneration")
    found = names(told, "mm_projector.proj.0.weight mm_projector.proj.2.weight")
    assert found == "model.mm_projector.in_proj.weight model.mm_projector.out_proj.weight"


def test_a_pair_of_stored_layers_becomes_one_layer():
    found = names(
        config("dory", "DoryForCausalLM"),
        "backbone.layers.2.mixer.g_proj.weight backbone.layers.3.mixer.up_proj.weight backbone.layers.2.attn_alpha "
        "backbone.layers.3.mlp_alpha backbone.layers.12.mixer.q_proj.weight backbone.embeddings.weight lm_head.weight",
    )
    assert set(found.split()) == {
        "model.layers.1.self_attn.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.lambda_1",
        "model.layers.1.lambda_2",
        "model.layers.6.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize("architecture", ["ExaoneForCausalLM", "LlamaForCausalLM"])
def test_a_class_of_another_type_follows_the_rules_of_the_type_it_is_built_for(architecture):
    stored = "transformer.wte.weight transformer.h.0.attn.attention.q_proj.weight transformer.h.0.mlp.c_fc_1.weight"
    assert set(names(config("exaone", architecture), stored).split()) == {
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    }
    assert names(config("exaone", "LlamaModel"), "transformer.h.0.ln_1.weight") == "layers.0.input_layernorm.weight"
    assert conversion_of_checkpoint(
        checkpoint(config("llama", "LlamaForCausalLM"), {"transformer.wte.weight": [2]})
    ).unexpected


def test_queries_are_cut_by_the_heads_of_the_type_that_a_class_is_built_for():
    told = config("sarvam_moe", "SarvamMoEForCausalLM", num_attention_heads=4, num_key_value_heads=2)
    found = conversion_of_checkpoint(checkpoint(told, {"model.layers.0.attention.query_key_value.weight": [16, 3]}))
    assert found.problems == ()
    shapes = {name.split(".")[-2]: tensor.shape for name, tensor in found.tensors.items()}
    assert shapes == {"q_proj": (8, 3), "k_proj": (4, 3), "v_proj": (4, 3)}


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        (
            {
                "model.llm.layers.0.mlp.experts.w2_weight": [2, 3, 4],
                "model.llm.layers.0.mlp.experts.w2_weight_scale": [2, 3, 1],
            },
            "in NVFP4 and MXFP8 are not computed here",
        ),
        ({"model.llm.layers.0.mlp.experts.w2_weight": [2, 3, 4]}, None),
    ],
)
def test_experts_that_have_to_be_computed_are_refused(shapes, problem):
    found = conversion_of_checkpoint(checkpoint(config("inkling2_loop_text", "Inkling2LoopForCausalLM"), shapes))
    assert [problem in each for each in found.problems] == ([True] if problem else [])
    assert list(found.tensors) == ([] if problem else ["model.layers.0.mlp.experts.down_proj"])


def test_scales_of_fp8_weights_are_fused_as_the_weights_are():
    told = config("qwen3_moe", "Qwen3MoeForCausalLM")
    stored = " ".join(
        f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight_scale_inv"
        for expert in "01"
        for kind in ("up", "gate")
    )
    assert names(told, stored) == "model.layers.0.mlp.experts.gate_up_proj_scale_inv"


def test_tensors_without_a_place_are_unexpected_or_ignored():
    told = config("llama", "LlamaForCausalLM", num_hidden_layers=1)
    stored = (
        "model.layers.0.self_attn.rotary_emb.inv_freq model.layers.1.mlp.up_proj.weight extra.weight model.norm.weight"
    )
    found = conversion_of_checkpoint(checkpoint(told, {key: [2] for key in stored.split()}))
    assert list(found.tensors) == ["model.norm.weight"]
    assert set(found.unexpected) == {"model.layers.1.mlp.up_proj.weight", "extra.weight"}
    assert found.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)


@pytest.mark.parametrize(
    ("shapes", "problem"),
    [
        (mixtral(0, 2), r"experts has no w1.weight for 1 expert: 1"),
        (mixtral(0, 1) | mixtral(2, weights=["w1"]), r"experts has no w[23].weight for 1 expert: 2"),
        (mixtral(0) | mixtral(1) | {next(iter(mixtral(1))): [3, 2]}, r"gate_up_proj cannot be made: tensors of shapes"),
        (
            mixtral(0, 1, 2) | {next(iter(mixtral(1))): [3, 2]},
            r"experts.1.w1.weight is \[3, 2\], and \[4, 2\] of other",
        ),
        (mixtral(0) | {FUSED: [1, 2, 4]}, f"{FUSED} and .*0.w2.weight would both become .*: names of two versions"),
        (
            {"model.norm.weight": [2], "norm.weight": [2]},
            r"^norm.weight and model.norm.weight would both become model.norm.weight$",
        ),
    ],
    ids=[
        "an expert is missing",
        "one of its tensors is missing",
        "shapes differ",
        "the one that differs",
        "fused and not",
        "two names for one",
    ],
)
def test_tensors_that_contradict_each_other_are_problems(shapes, problem):
    found = conversion_of_checkpoint(checkpoint(MIXTRAL, shapes))
    assert any(re.search(problem, each) for each in found.problems), found.problems


def test_all_problems_are_collected():
    shapes = mixtral(0, 2) | {"model.norm.weight": [2], "norm.weight": [2], FUSED: [1, 2, 4]}
    problems = conversion_of_checkpoint(checkpoint(MIXTRAL, shapes)).problems
    for text in ("no w1.weight for 1 expert: 1", "no w2", "no w3", "two versions", "both become model.norm.weight"):
        assert any(text in each for each in problems), text


def test_an_operation_that_is_not_known_is_refused_by_name(monkeypatch):
    monkeypatch.delitem(operations.OPERATIONS, "Concatenate")
    found = conversion_of_checkpoint(checkpoint(MIXTRAL, mixtral(0)))
    (problem,) = found.problems
    assert "mlp.experts.gate_up_proj cannot be made: transformers' operation Concatenate is not known" in problem
    assert "gate_up_proj" not in "".join(found.tensors)


@pytest.mark.parametrize("told", [None, {}, config("llama", "LlamaSomething"), {"model_type": "llama"}])
def test_a_class_that_is_not_known_is_refused(told):
    with pytest.raises(NamesUnknownError, match="is not known"):
        conversion_of_checkpoint(checkpoint(told, {"model.norm.weight": [2]}))
