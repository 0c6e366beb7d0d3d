"""Compare what two runtimes computed: to the last bit, and within the rounding of the dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROUNDING = {torch.float64: 1e-7, torch.float32: 1.3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
"""Relative differences that rounding makes where many products are added: those of torch.testing.assert_close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComparison:
    """How two answers differ.

    Attributes:
        is_identical: They are the same to the last bit.
        is_within_rounding: No two numbers differ by more than rounding of the dtype, relative to the largest number.
        max_difference: The largest difference of two numbers; `None` where they cannot be compared.
    """

    is_identical: bool
    is_within_rounding: bool
    max_difference: float | None


def compare_answers(answer: torch.Tensor, expected: torch.Tensor) -> AnswerComparison:
    """Compare `answer` with `expected`; where the same numbers are added in another order, the last bits differ."""
    is_identical = torch.equal(answer, expected)
    difference = _difference(answer, expected)
    is_within = is_identical
    if not is_identical and difference is not None and answer.dtype == expected.dtype:
        scale = float(expected.double().abs().max())
        is_within = difference <= _ROUNDING.get(answer.dtype, 0.0) * scale  # not for NaN
    return AnswerComparison(is_identical=is_identical, is_within_rounding=is_within, max_difference=difference)


def _difference(answer: torch.Tensor, expected: torch.Tensor) -> float | None:
    if answer.shape != expected.shape:
        return None
    return float((answer.double() - expected.double()).abs().max()) if answer.numel() else 0.0
