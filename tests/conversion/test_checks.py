"""Experts that lack tensors are told from experts that have none of a kind."""

from bigload.checkpoint.model import Span, TensorInfo
from bigload.conversion.checks import missing_experts, unequal_experts
from bigload.dtypes import DTYPES

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


def test_experts_of_another_shape_than_most_are_named_each():
    shapes = {"a": (4, 2), "b": (4, 2), "c": (3, 2), "d": (4, 1)}
    stored = {
        f"layer.experts.{number}.up": TensorInfo("", DTYPES["F32"], shape, Span("file", 0, 0))
        for number, shape in enumerate(shapes.values())
    }
    assert list(unequal_experts(stored, ())) == [
        "layer.experts.2.up is [3, 2], and [4, 2] of other experts: all have to be of one shape",
        "layer.experts.3.up is [4, 1], and [4, 2] of other experts: all have to be of one shape",
    ]
    assert list(unequal_experts(stored, stored)) == []  # of which the model has several kinds
