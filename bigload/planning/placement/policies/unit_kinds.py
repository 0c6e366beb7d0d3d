"""Units of the same size are the same to a policy: a choice of streamed units is a count per kind.

What a choice costs, and what it must cost at least when it is not complete, is answered here for both searches.
"""

from __future__ import annotations

from collections.abc import Sequence

from bigload.planning.model.units import Unit
from bigload.planning.placement.policies.memory_tiers import Host, TierSplit, TierSplitter, members_of_forms

Counts = tuple[int, ...]
"""How many units of each kind are streamed."""


class UnitKinds:
    """The kinds of a list of units; `of[i]` is the kind of unit `i`, `examples[k]` a unit of kind `k`."""

    def __init__(self, units: Sequence[Unit], host: Host) -> None:
        self.host = host
        numbers: dict[tuple[int, int, int, int], int] = {}
        self.of = [
            numbers.setdefault((unit.num_bytes, unit.run_bytes, unit.token_bytes, unit.stream_bytes), len(numbers))
            for unit in units
        ]
        self.examples = [units[self.of.index(kind)] for kind in range(len(numbers))]
        self.none: Counts = (0,) * len(numbers)
        self.sparse_tokens, self.sparse_bytes = min(
            ((unit.token_bytes, unit.num_bytes) for unit in units if unit.num_bytes),
            key=lambda pair: pair[0] / pair[1],
            default=(0, 1),
        )
        self._costs: dict[Counts, int | None] = {}

    def more(self, counts: Counts, kind: int, number: int = 1) -> Counts:
        """Return `counts` with `number` more of a kind."""
        return (*counts[:kind], counts[kind] + number, *counts[kind + 1 :])

    def cost(self, counts: Counts) -> int | None:
        """Return the least that a token costs when these are streamed; `None` when the host cannot hold them."""
        if counts not in self._costs:
            split = self.split([unit for count, unit in zip(counts, self.examples, strict=True) for _ in range(count)])
            self._costs[counts] = None if split is None else split.cost
        return self._costs[counts]

    def split(self, units: Sequence[Unit]) -> TierSplit | None:
        """Split streamed units among RAM and disk."""
        return TierSplitter(members_of_forms(units), self.host, len(units)).best(None)

    def least_cost(self, counts: Counts, missing: int) -> int:
        """Return a cost that is not above that of streaming these and `missing` bytes more, of whatever kind."""
        tokens = -(-missing * self.sparse_tokens // self.sparse_bytes)
        num_bytes = missing
        for count, unit in zip(counts, self.examples, strict=True):
            if count:
                tokens += count * unit.token_bytes
                num_bytes += count * unit.num_bytes
        beyond_ram = max(num_bytes - max(self.host.ram_room, 0), 0)
        on_disk = -(-beyond_ram * self.sparse_tokens // self.sparse_bytes)
        return tokens * self.host.ram_cost + on_disk * (self.host.disk_cost - self.host.ram_cost)
