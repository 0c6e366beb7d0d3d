"""Error about what does not fit, and limits that would help, tried with the policy before they are suggested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bigload.devices import CPU, DISK, Device
from bigload.errors import DoesNotFitError
from bigload.planning.choices import Balance
from bigload.planning.placement.policies.bounds import lower_bound
from bigload.planning.placement.problem import Misfit, PlacementProblem
from bigload.planning.placement.solve import Solution, solve
from bigload.units import GIB, KIB, MIB, format_size

_STEPS = 8


def does_not_fit(name: str, problem: PlacementProblem, misfit: Misfit, policy: str) -> DoesNotFitError:
    """Return the error that says what is short where, and what would do; `name` is that of the checkpoint."""
    budget = problem.budget
    rows, room = [], 0
    width = max(len(str(device)) for device, _ in budget)
    for device, limit in budget:
        if limit is None:
            continue
        runs = device.is_accelerator or not budget.accelerators
        terms = {
            "workspace": misfit.workspace.get(device, 0),
            "overhead and activations": problem.fixed_bytes.get(device, 0) if runs else 0,
        }
        taken = {term: size for term, size in terms.items() if size}
        left = limit - sum(taken.values())
        room += max(left, 0)
        signed = format_size(left) if left >= 0 else f"-{format_size(-left)}"
        minus = "".join(f" - {format_size(size)} {term}" for term, size in taken.items())
        rows.append(f"{device!s:<{width}}  {format_size(limit):>12}{minus}" + (f" = {signed}" if minus else ""))
    shortfalls = {str(device): lacking for device, lacking in misfit.too_small.items()}
    if misfit.unplaced_bytes:
        shortfalls["total"] = misfit.unplaced_bytes
    beside = sum(unit.cache_bytes + unit.logits_bytes for unit in problem.units)
    # RAM that runs the model may lack room for caches, overhead and activations too.
    needed = max(sum(unit.num_bytes + unit.run_bytes for unit in problem.units), misfit.unplaced_bytes)
    usable = needed - misfit.unplaced_bytes if misfit.unplaced_bytes else room
    if room > usable and not any(unit.run_bytes for unit in problem.units):
        rows.append(f"modules stay whole, which leaves {format_size(room - usable)} of that unused")
    if beside:
        rows.append(f"caches and logits take {format_size(beside)} where the blocks run")
    biggest = max(problem.units, key=lambda unit: unit.num_bytes, default=None)
    if misfit.too_small and biggest is not None:
        size = format_size(biggest.num_bytes)
        rows.append(f"what is streamed needs room there; the largest module is {biggest.name}, {size}")
    if misfit.too_small and beside:
        rows.append("a shorter --context takes less; bigload plan --max-context says what there is room for")
    return DoesNotFitError(
        name,
        needed_bytes=needed,
        usable_bytes=usable,
        shortfalls=shortfalls,
        details=rows,
        hint=_hint(problem, misfit, policy),
    )


def _hint(problem: PlacementProblem, misfit: Misfit, policy: str) -> str | None:
    enough = limits_that_fit(problem, misfit, policy)
    would_do = f"this would do: {enough}" if enough else None
    budget = problem.budget
    with_disk = replace(problem, budget=replace(budget, limits=(*budget.limits, (DISK, None))))
    if budget.has_disk or isinstance(solve(with_disk, policy), Misfit):
        return would_do
    allow = "allow the disk (drop --no-disk or disk=0)"
    return f"{would_do}, or {allow}" if would_do else allow


def ram_without_disk(solution: Solution, policy: str) -> str | None:
    """Return a limit for `cpu` with which nothing would be on disk, such as `cpu=93GiB`; `None` when none was found."""
    problem, placement = solution.problem, solution.placement
    homes = list(zip(problem.units, placement.devices, strict=True))
    host_bytes = sum(unit.num_bytes for unit, home in homes if not home.is_accelerator)
    if not problem.budget.accelerators:
        host_bytes += sum(unit.run_bytes for unit in problem.units) + problem.fixed_bytes.get(CPU, 0)
    size = _least_ram(problem, policy, host_bytes, lambda found: DISK not in found.placement.devices)
    return None if size is None else f"cpu={written(size)}"


def limits_that_fit(problem: PlacementProblem, misfit: Misfit, policy: str) -> str | None:
    """Return limits with which the units fit, as command-line options; `None` when none were found."""
    raised: dict[Device, int] = {}
    budget = problem.budget
    for device, lacking in misfit.too_small.items():
        raised[device] = rounded((budget.get(device) or 0) + lacking)
        budget = budget.with_limit(device, raised[device])
    grown = replace(problem, budget=budget)
    if not raised or isinstance(solve(grown, policy), Misfit):
        start = min(misfit.host_bytes, lower_bound(grown).offloaded_bytes) or (budget.get(CPU) or 0)
        size = _least_ram(grown, policy, start, lambda _found: True)
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


def _least_ram(problem: PlacementProblem, policy: str, start: int, accept: Callable[[Solution], bool]) -> int | None:
    """Return a size from `start` to the whole model that `accept` likes the placement of, the least of those tried.

    A few sizes are tried upwards. Between the first good one and the one before, halving goes on.
    """

    def suffices(size: int, balance: Balance = Balance.FILL) -> bool:
        # How accelerators share what they hold changes neither what fits nor what is streamed, but takes a search.
        asked = replace(problem, budget=problem.budget.with_limit(CPU, size), balance=balance)
        found = solve(asked, policy)
        return isinstance(found, Solution) and accept(found)

    total = sum(unit.num_bytes + unit.run_bytes for unit in problem.units) + max(
        problem.fixed_bytes.values(), default=0
    )
    tried = (rounded(start + max(total - start, 0) * step // _STEPS) for step in range(_STEPS + 1))
    sizes = [size for size in dict.fromkeys(tried) if size > 0]
    good = next((index for index, size in enumerate(sizes) if suffices(size)), None)
    if good is None:
        return None
    low, high = sizes[good - 1] if good else sizes[good], sizes[good]
    while (middle := rounded((low + high) // 2)) not in (low, high):
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high if suffices(high, problem.balance) else None
