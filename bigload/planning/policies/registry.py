"""The code of every policy. A new policy is a file in this folder, a name in `policy.py` and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from bigload.planning.placement import PlacementPolicy
from bigload.planning.policies.policy import Policy
from bigload.planning.policies.sequential import place_sequentially

POLICIES: Mapping[Policy, PlacementPolicy] = MappingProxyType({Policy.SEQUENTIAL: place_sequentially})
