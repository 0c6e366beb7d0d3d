import pytest

from bigload.dtypes import DTYPES
from bigload.planning.model.config import MAX_NUMBER, ModelConfig


@pytest.mark.parametrize("key", ["hidden_size", "n_embd", "n_embed", "d_model"])
def test_a_number_is_found_under_each_name_that_families_give_it(key):
    assert ModelConfig({key: 64}).number("hidden_size") == 64


@pytest.mark.parametrize(
    "config",
    [
        {"text_config": {"num_attention_heads": 4}, "num_attention_heads": 8},
        {"llm_config": {"n_head": 4}},
        {"thinker_config": {"text_config": {"num_attention_heads": 4}, "num_attention_heads": 8}},
        {"vision_config": {"num_attention_heads": 16}, "num_attention_heads": 4},
    ],
)
def test_questions_go_to_the_section_of_the_text_decoder_first(config):
    assert ModelConfig(config).number("num_heads") == 4


def test_an_explicit_null_in_the_section_takes_back_what_the_root_says():
    assert ModelConfig({"text_config": {"sliding_window": None}, "sliding_window": 512}).number("window") is None


def test_a_number_in_the_section_of_the_attention_is_found():
    assert ModelConfig({"n_heads": 48, "attn_config": {"kv_n_heads": 8}}).num_kv_heads == 8


@pytest.mark.parametrize("wrong", ["32", 32.0, True, -1, MAX_NUMBER, [32], {"value": 32}])
def test_an_answer_of_the_wrong_kind_is_none(wrong):
    config = ModelConfig({"num_hidden_layers": wrong, "head_dim": wrong, "hidden_size": wrong, "n_head": wrong})
    assert config.number("num_layers") is None
    assert config.head_dim is None
    assert config.num_kv_heads is None


def test_a_wrong_answer_does_not_hide_a_right_one():
    assert ModelConfig({"hidden_size": "big", "n_embd": 64}).number("hidden_size") == 64


def test_heads_share_the_width_of_the_model_unless_their_own_is_given():
    assert ModelConfig({"hidden_size": 64, "num_attention_heads": 4}).head_dim == 16
    assert ModelConfig({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}).head_dim == 32
    assert ModelConfig({"hidden_size": 64, "num_attention_heads": 0}).head_dim is None


def test_multi_query_attention_has_one_key_head():
    assert ModelConfig({"multi_query": True, "n_head": 71}).num_kv_heads == 1
    assert ModelConfig({"multi_query": "yes", "n_head": 71}).num_kv_heads == 71


@pytest.mark.parametrize(
    ("said", "dtype"), [("float16", "F16"), ("torch.bfloat16", "BF16"), ("int8", None), (16, None), (None, None)]
)
def test_the_dtype_is_one_that_models_compute_in(said, dtype):
    assert ModelConfig({"torch_dtype": said}).dtype is (DTYPES[dtype] if dtype else None)


@pytest.mark.parametrize("wrong", ["full_attention", ["full_attention", 3], {"0": "full_attention"}, 7])
def test_layer_types_are_a_list_of_words_or_nothing(wrong):
    assert ModelConfig({"layer_types": wrong}).layer_types is None


def test_sections_that_nest_without_end_are_left_alone():
    config = {"hidden_size": 64}
    for _ in range(5000):
        config = {"text_config": config}
    assert ModelConfig(config).number("hidden_size") is None


@pytest.mark.parametrize("raw", [None, {}])
def test_a_missing_config_answers_nothing(raw):
    config = ModelConfig(raw)
    assert not config.is_known
    assert (config.model_types, config.architectures, config.number("window")) == ((), (), None)
    assert not config.section("vision_config").is_known


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (None, {}),
        ({}, {}),
        ({"a": 1}, {"a": 1}),
        ({"a": 1, "text_config": {"a": 2}}, {"a": 2}),
        ({"llm_config": {"a": 2}}, {"a": 2}),
        ({"thinker_config": {"text_config": {"a": 3}}}, {"a": 3}),
        (
            {"a": 1, "text_config": None, "vision_config": {"a": 2}},
            {"a": 1, "text_config": None, "vision_config": {"a": 2}},
        ),
        ({"a": 1, "text_config": [2]}, {"a": 1, "text_config": [2]}),
    ],
)
def test_the_text_config_is_the_nested_one_or_the_whole(config, text):
    assert ModelConfig(config).text == text


@pytest.mark.parametrize("value", [True, 0, -1, 8.0, "8", [8], None, {}, 10**30])
def test_what_is_no_number_of_things_is_not_said(value):
    assert ModelConfig({"num_experts": value}).count("num_experts") is None


def test_the_first_key_that_has_a_number_is_taken():
    said = {"num_local_experts": None, "num_experts": 3, "n_routed_experts": 4}
    assert ModelConfig(said).count("num_experts") == 3


def test_the_language_model_is_asked_before_the_outer_config():
    config = {"num_hidden_layers": 4, "text_config": {"num_hidden_layers": 8}}
    assert ModelConfig(config).count("num_hidden_layers") == 8


def test_what_the_language_model_does_not_say_the_outer_config_may():
    assert ModelConfig({"top_k": 2, "text_config": {"num_hidden_layers": 8}}).count("top_k") == 2


def test_no_config_says_nothing():
    assert ModelConfig(None).count("num_experts") is None


def test_of_experts_that_each_layer_numbers_itself_the_most_count():
    assert ModelConfig({"moe_topk": [2, 8, 2]}).experts_per_token == 8
    assert ModelConfig({"moe_topk": [2, "8"], "num_experts_per_tok": 4}).experts_per_token == 4
    assert ModelConfig({"moe_topk": []}).experts_per_token is None
