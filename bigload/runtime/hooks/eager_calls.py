"""Decorator for functions that torch.compile calls as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def eager(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as one that torch.compile calls as it is, and does not look into.

    What says so imports the compiler, which takes seconds: that has to wait until somebody else has imported it.
    """

    @functools.wraps(function)
    def run(*args: Any) -> None:
        if "torch._dynamo" not in sys.modules:
            return function(*args)
        if not disabled:
            disabled.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return disabled[0](*args)

    disabled: list[Callable[..., None]] = []
    return run
