"""What would help: limits that are tried with the policy before they are suggested."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bigload.devices import CPU, DISK, Device
from bigload.planning.budget import MemoryBudget
from bigload.planning.placement import Misfit, Placement, PlacementPolicy
from bigload.planning.units import Unit
from bigload.units import GIB, KIB, MIB

_STEPS = 8


def ram_without_disk(
    units: Sequence[Unit], budget: MemoryBudget, placement: Placement, policy: PlacementPolicy
) -> str | None:
    """Return a limit for `cpu` with which nothing would be on disk, such as `cpu=93GiB`; `None` when none was found."""
    host_bytes = sum(
        unit.num_bytes for unit, home in zip(units, placement.devices, strict=True) if not home.is_accelerator
    )
    size = _least_ram(units, budget, host_bytes, policy, lambda found: DISK not in found.devices)
    return None if size is None else f"cpu={written(size)}"


def limits_that_fit(units: Sequence[Unit], budget: MemoryBudget, misfit: Misfit, policy: PlacementPolicy) -> str | None:
    """Return limits with which `units` fit, as command-line options; `None` when none were found."""
    raised: dict[Device, int] = {}
    for device, lacking in misfit.too_small.items():
        raised[device] = rounded((budget.get(device) or 0) + lacking)
        budget = budget.with_limit(device, raised[device])
    if not raised or isinstance(policy(units, budget), Misfit):
        start = misfit.host_bytes or (budget.get(CPU) or 0)
        size = _least_ram(units, budget, start, policy, lambda _found: True)
        if size is None:
            return None
        raised[CPU] = size
    return " ".join(f"-m {device}={written(size)}" for device, size in raised.items())


def rounded(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to a size that is short to type: whole GiB, or whole MiB or KiB of small models."""
    factor = next((factor for factor in (GIB, MIB) if num_bytes >= factor), KIB)
    return -(-num_bytes // factor) * factor


def written(num_bytes: int) -> str:
    """Return a size as `rounded` makes them, in the words of an option."""
    name, factor = next(
        ((n, f) for n, f in (("GiB", GIB), ("MiB", MIB)) if num_bytes % f == 0 and num_bytes), ("KiB", KIB)
    )
    return f"{num_bytes // factor}{name}"


def _least_ram(
    units: Sequence[Unit],
    budget: MemoryBudget,
    start: int,
    policy: PlacementPolicy,
    accept: Callable[[Placement], bool],
) -> int | None:
    """Return the first of a few sizes from `start` to the whole model that `accept` likes the placement of."""
    total = sum(unit.num_bytes for unit in units)
    for step in range(_STEPS + 1):
        size = rounded(start + max(total - start, 0) * step // _STEPS)
        if size > 0:
            found = policy(units, budget.with_limit(CPU, size))
            if isinstance(found, Placement) and accept(found):
                return size
    return None
