"""The names of the policies, apart from their code: the command line's help needs no more."""

from __future__ import annotations

from enum import StrEnum


class Policy(StrEnum):
    """A way to place units on devices."""

    OPTIMAL = "optimal"
    """The least time per token, then the fewest device changes, then the emptiest fullest accelerator."""
    SEQUENTIAL = "sequential"
    """Fill the devices one after the other, in execution order."""
    BALANCED = "balanced"
    """Keep the fullest accelerator as empty as possible."""
    BALANCED_LOW_0 = "balanced_low_0"
    """Keep the first accelerator as empty as possible, then the fullest of the others."""
