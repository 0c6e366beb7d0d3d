"""Answers that differ in the last bit are told from answers that differ."""

import pytest
import torch

from bigload.bench.answers import compare_answers

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def logits(dtype):
    return torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)).to(dtype)


def next_number(values):
    bits = values.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[values.itemsize])
    return (bits + 1).view(values.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_last_bit_is_rounding_and_a_hundredth_more_is_not(dtype):
    expected = logits(dtype)
    found = compare_answers(next_number(expected), expected)
    assert (found.is_identical, found.is_within_rounding) == (False, True)
    assert 0 < found.max_difference < 0.1
    found = compare_answers(expected * 1.05, expected)
    assert (found.is_identical, found.is_within_rounding) == (False, False)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.tensor([float("nan")]), torch.ones(1)),
        (torch.tensor([float("inf")]), torch.ones(1)),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.tensor([1e-9]), torch.zeros(1)),
    ],
)
def test_what_rounding_does_not_explain_is_another_answer(answer, expected):
    found = compare_answers(answer, expected)
    assert (found.is_identical, found.is_within_rounding) == (False, False)


def test_the_same_is_within_rounding():
    found = compare_answers(torch.ones(2), torch.ones(2))
    assert (found.is_identical, found.is_within_rounding, found.max_difference) == (True, True, 0.0)
