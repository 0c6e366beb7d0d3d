"""Certificate of a plan: what it keeps off the accelerators, and the least that any plan has to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bigload.devices import CPU, DISK
from bigload.planning.placement.policies.bounds import lower_bound
from bigload.planning.placement.policies.optimal import token_cost
from bigload.planning.placement.problem import Placement, PlacementProblem
from bigload.units import counted, format_size


class Verdict(StrEnum):
    """Knowledge about the quality of a plan."""

    OPTIMAL = "optimal"
    """No placement whatever streams fewer bytes per second of the estimate."""
    OPTIMAL_IN_ORDER = "optimal-in-order"
    """None does that gives each accelerator its modules in the order in which they run, and streams to the first used.

    accelerate and transformers stream to the first accelerator of a device map. Where another order or another device
    to stream to would cost less, this verdict does not say.
    """
    BOUNDED = "bounded"
    """Others may, by as much as the bound leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Bytes off the accelerators (on disk, where there are none) and on disk: of the plan, and the least of any plan.

    `largest_bytes` is the size of the largest unit, so that a gap can be told in blocks.
    """

    verdict: Verdict
    offloaded_bytes: int
    least_offloaded_bytes: int
    disk_bytes: int
    least_disk_bytes: int
    largest_bytes: int

    @property
    def within_blocks(self) -> int:
        """Return the gap to the bound, in units of the largest one, rounded up."""
        gap = self.offloaded_bytes - self.least_offloaded_bytes
        return -(-gap // self.largest_bytes) if gap > 0 and self.largest_bytes else 0

    def __str__(self) -> str:
        if self.verdict is Verdict.OPTIMAL:
            return "optimal: no plan streams less"
        least = format_size(self.least_offloaded_bytes)
        gap = f"within {counted(self.within_blocks, 'block')}" if self.within_blocks else "equal to the bound in bytes"
        bound = f"no plan at all offloads less than {least} ({gap})"
        in_order = "optimal with modules in order, streamed to the first device used"
        return f"{in_order}; {bound}" if self.verdict is Verdict.OPTIMAL_IN_ORDER else bound


def certify(problem: PlacementProblem, placement: Placement) -> Certificate:
    """Return what can be said about a placement of any policy."""
    bound = lower_bound(problem)
    homes = list(zip(problem.units, placement.devices, strict=True))
    on_disk = sum(unit.num_bytes for unit, device in homes if device == DISK)
    in_ram = sum(unit.num_bytes for unit, device in homes if device == CPU)
    if token_cost(problem, placement) <= bound.cost:
        verdict = Verdict.OPTIMAL
    else:
        verdict = Verdict.OPTIMAL_IN_ORDER if placement.is_proven else Verdict.BOUNDED
    return Certificate(
        verdict=verdict,
        offloaded_bytes=on_disk + in_ram if problem.budget.accelerators else on_disk,
        least_offloaded_bytes=bound.offloaded_bytes,
        disk_bytes=on_disk,
        least_disk_bytes=bound.disk_bytes,
        largest_bytes=max((unit.num_bytes for unit in problem.units), default=0),
    )
