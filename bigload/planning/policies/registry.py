"""The policies by name. A new policy is a file in this folder and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from bigload.planning.placement import PlacementPolicy
from bigload.planning.policies.sequential import place_sequentially


class Policy(StrEnum):
    """A way to place units on devices."""

    SEQUENTIAL = "sequential"
    """Fill the devices one after the other, in execution order."""


POLICIES: Mapping[Policy, PlacementPolicy] = MappingProxyType({Policy.SEQUENTIAL: place_sequentially})
