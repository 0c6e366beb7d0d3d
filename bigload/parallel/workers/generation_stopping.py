"""Synchronized stopping criteria: generation stops at the same token in all workers, even by the clock.

A worker that stopped before the others would leave them waiting in a collective. So where `generate` of transformers
has criteria that are not functions of the tokens alone, rank 0 decides. The method by which it collects them,
`_get_stopping_criteria`, is private to transformers; a model without it stops as it does.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_OF_TOKENS_ALONE = {"MaxLengthCriteria", "EosTokenCriteria", "StopStringCriteria"}


def synchronize_stopping(model: nn.Module) -> None:
    """Make `model.generate` stop where that of rank 0 does."""
    collect = getattr(model, "_get_stopping_criteria", None)
    if collect is None:
        return

    @wraps(collect)
    def collect_agreed(*args: object, **kwargs: object) -> Any:  # noqa: ANN401 - a list of transformers
        criteria = collect(*args, **kwargs)
        return criteria if all(type(each).__name__ in _OF_TOKENS_ALONE for each in criteria) else _agreed(criteria)

    model._get_stopping_criteria = collect_agreed  # type: ignore[assignment]


def _agreed(criteria: Any) -> Any:  # noqa: ANN401 - a list of transformers
    kind: Any = type(criteria)

    class Agreed(kind):  # type: ignore[misc, unused-ignore]
        """Criteria whose result is that of rank 0."""

        def __call__(self, *args: object, **kwargs: object) -> torch.Tensor:
            is_done: torch.Tensor = super().__call__(*args, **kwargs).to(torch.uint8).contiguous()
            dist.broadcast(is_done, 0)
            return is_done.bool()

    return Agreed(criteria)
