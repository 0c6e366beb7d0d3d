"""Registry of placement policies: where the code of each is, and its capabilities as data.

A new policy is a file in `placement/policies/` and an entry here; from outside, `register_policy` adds one. Code is
named, not imported, so that the command line lists policies without loading it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from bigload.errors import OptionError
from bigload.planning.choices import Policy

_FOLDER = "bigload.planning.placement.policies"


class PolicyEntry(NamedTuple):
    """One policy.

    Attributes:
        code: A `PlacementPolicy`, or `module:function` of one, imported when it is first asked.
        is_exact: Whether it looks for the least time per token: what it does not find, no other policy finds.
        splits_experts: Whether it can place routed experts apart from their block.
        fills_in_order: Whether it fills earlier accelerators first, whatever `--balance` says.
        streams_all: Whether it keeps all weights off accelerators, with no more in flight than asked for. It is for
            cards, so a card that is too small is an error, not left out.
    """

    code: Callable[..., object] | str
    is_exact: bool = False
    splits_experts: bool = False
    fills_in_order: bool = False
    streams_all: bool = False

    def load(self) -> Callable[..., object]:
        if not isinstance(self.code, str):
            return self.code
        module, _, function = self.code.partition(":")
        found: Callable[..., object] = getattr(import_module(module), function)
        return found


POLICIES: dict[str, PolicyEntry] = {
    Policy.OPTIMAL: PolicyEntry(code=f"{_FOLDER}.optimal:place_optimally", is_exact=True, splits_experts=True),
    Policy.SEQUENTIAL: PolicyEntry(code=f"{_FOLDER}.sequential:place_sequentially", fills_in_order=True),
    Policy.BALANCED: PolicyEntry(code=f"{_FOLDER}.balanced:place_balanced"),
    Policy.BALANCED_LOW_0: PolicyEntry(code=f"{_FOLDER}.balanced:place_balanced_low_0"),
    Policy.STREAMED: PolicyEntry(code=f"{_FOLDER}.sequential:place_streamed", streams_all=True),
}
"""Policies by name, in the order in which help lists them."""


def register_policy(name: str, entry: PolicyEntry) -> None:
    """Add a policy, which options, plan files and the command line then know by `name`.

    Raises:
        ValueError: the name is taken.
    """
    if name in POLICIES:
        raise ValueError(f"there is a policy {name!r} already")
    POLICIES[name] = entry


def policy_named(name: str) -> PolicyEntry:
    """Return the policy called `name`."""
    if name not in POLICIES:
        raise OptionError(f"no policy {name!r}", hint=f"known are {', '.join(POLICIES)}")
    return POLICIES[name]
