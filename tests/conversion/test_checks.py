"""Experts that lack tensors are told from experts that have none of a kind."""

from bigload.conversion.checks import missing_experts

STORED = [
    *(f"layer.experts.{number}.up" for number in range(4)),
    *(f"layer.experts.{number}.down" for number in (0, 1)),
]


def test_experts_without_a_tensor_that_others_have_are_named():
    assert list(missing_experts(STORED, ())) == ["layer.experts has no down for 2 experts: 2, 3"]


def test_a_model_may_have_a_tensor_for_the_first_experts_only():
    assert list(missing_experts(STORED, (), fitting=STORED)) == []
    assert list(missing_experts(STORED[:4] + STORED[5:], (), fitting=STORED)) == [
        "layer.experts has no down for 1 expert: 0"
    ]
