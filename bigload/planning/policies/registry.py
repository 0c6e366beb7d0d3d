"""The code of every policy. A new policy is a file in this folder, a name in `policy.py` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bigload.planning.placement import PlacementPolicy
from bigload.planning.policies.balanced import place_balanced, place_balanced_low_0
from bigload.planning.policies.optimal import place_optimally
from bigload.planning.policies.policy import Policy
from bigload.planning.policies.sequential import place_sequentially

POLICIES: Mapping[Policy, PlacementPolicy] = MappingProxyType(
    {
        Policy.OPTIMAL: place_optimally,
        Policy.SEQUENTIAL: place_sequentially,
        Policy.BALANCED: place_balanced,
        Policy.BALANCED_LOW_0: place_balanced_low_0,
    }
)
