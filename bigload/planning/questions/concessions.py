"""Less than was asked for, in a stated order, until a plan is good enough: `plan --fit` and `plan --target`.

What gives way, each only as far as it has to, and the next one only where the ones before are not enough:

1. the context, down to a floor;
2. the batch, down to one sequence;
3. the KV cache, to 8 bits;
4. weights of 32 bits or more, to BF16.

A dtype that was asked for stays. Where a later one gives way, the ones before are taken back as far as that allows: the
batch first, then the context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bigload.dtypes import DTYPES, DType
from bigload.planning.model.structure import ModelStructure
from bigload.planning.options import PlanOptions
from bigload.planning.workload import Workload

LEAST_CONTEXT = 4096
"""Tokens below which a context does not shrink, unless less was asked for."""

_CONTEXT_STEP = 256
_KV_DTYPE, _LOAD_DTYPE = DTYPES["F8_E4M3"], DTYPES["BF16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Concessions:
    """Options that are good enough, or as good as it gets, to ask for instead of others.

    `changes` are words such as `context 32768 -> 9216`; none where nothing had to give way.
    """

    options: PlanOptions
    changes: tuple[str, ...]
    is_enough: bool


def concede(
    structure: ModelStructure,
    options: PlanOptions,
    is_enough: Callable[[PlanOptions], bool],
    *,
    least_context: int = LEAST_CONTEXT,
) -> Concessions:
    """Return the least that has to give way for `is_enough` to be true; all of it where that is not enough either.

    Less of anything is taken to be at least as good: it needs less memory, and a token less time.
    """
    found, enough = options.workload, is_enough(options)
    levels = [] if enough else list(_levels(options.workload, structure, least_context))
    for level in levels:
        found = level
        enough = is_enough(replace(options, workload=level))
        if enough:
            found = _taken_back(options, level, is_enough)
            break
    return Concessions(
        options=replace(options, workload=found),
        changes=tuple(_changes(options.workload, found)),
        is_enough=enough,
    )


def _levels(asked: Workload, structure: ModelStructure, least_context: int) -> Iterator[Workload]:
    """Yield what is left when more and more gives way, each as far as it goes."""
    now = replace(asked, context=min(asked.context, least_context))
    if now.context < asked.context:
        yield now
    if now.batch > 1:
        now = replace(now, batch=1)
        yield now
    if now.context and now.kv_dtype is None:
        now = replace(now, kv_dtype=_KV_DTYPE)
        yield now
    if now.load_dtype is None and any(tensor.dtype.name in ("F32", "F64") for tensor in structure.root.all_tensors()):
        yield replace(now, load_dtype=_LOAD_DTYPE)


def _taken_back(options: PlanOptions, least: Workload, is_enough: Callable[[PlanOptions], bool]) -> Workload:
    """Return the largest batch, then the longest context, that `is_enough` allows beside the dtypes of `least`."""
    asked = options.workload

    def is_good(workload: Workload) -> bool:
        return is_enough(replace(options, workload=workload))

    def larger(by: int) -> Workload:
        return replace(least, batch=least.batch + by)

    batch = larger(_most(asked.batch - least.batch, lambda by: is_good(larger(by))))

    def longer(steps: int) -> Workload:
        return replace(batch, context=min(batch.context + steps * _CONTEXT_STEP, asked.context))

    num_steps = -(-(asked.context - least.context) // _CONTEXT_STEP)
    return longer(_most(num_steps, lambda steps: is_good(longer(steps))))


def _most(highest: int, is_good: Callable[[int], bool]) -> int:
    """Return the largest number up to `highest` that is good; 0 is."""
    return bisect_left(range(highest), x=True, key=lambda number: not is_good(number + 1))


def _changes(asked: Workload, found: Workload) -> Iterator[str]:
    def name(dtype: DType | None) -> str:
        return "as stored" if dtype is None else str(dtype)

    if found.context != asked.context:
        yield f"context {asked.context} -> {found.context}"
    if found.batch != asked.batch:
        yield f"batch {asked.batch} -> {found.batch}"
    if found.kv_dtype != asked.kv_dtype:
        yield f"KV cache -> {found.kv_dtype}"
    if found.load_dtype != asked.load_dtype:
        yield f"weights {name(asked.load_dtype)} -> {found.load_dtype}"
