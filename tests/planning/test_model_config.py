import pytest

from bigload.planning.model_config import count_of, text_config


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
    assert text_config(config) == text


@pytest.mark.parametrize("value", [True, 0, -1, 8.0, "8", [8], None, {}, 10**30])
def test_what_is_no_number_of_things_is_not_said(value):
    assert count_of({"num_experts": value}, "num_experts") is None


def test_the_first_key_that_has_a_number_is_taken():
    assert count_of({"a": None, "b": 3, "c": 4}, "a", "b", "c") == 3


def test_the_language_model_is_asked_before_the_outer_config():
    config = {"num_hidden_layers": 4, "text_config": {"num_hidden_layers": 8}}
    assert count_of(config, "num_hidden_layers") == 8


def test_what_the_language_model_does_not_say_the_outer_config_may():
    assert count_of({"top_k": 2, "text_config": {"num_hidden_layers": 8}}, "top_k") == 2


def test_no_config_says_nothing():
    assert count_of(None, "num_experts") is None
